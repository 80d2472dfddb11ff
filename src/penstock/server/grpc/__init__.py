"""The gateway over gRPC: what stands before the library, and the handlers behind it.

A connection comes in at `front`, which reads its HTTP/2 frames along, counts them in the node's
budget and passes all bytes on to the gRPC library. The library calls the handlers of `listener`;
`messages` translates between its messages and the gateway's arguments and answers.
"""
