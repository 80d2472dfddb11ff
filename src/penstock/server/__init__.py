"""The network edges of a node: `penstock serve`, a node within a process, and the gateway.

The gateway translates gRPC (`grpc`) and HTTP (`http`) to the native protocol. What both of them do
is here, once: the arguments and answers of every call (`vocabulary`), the calls themselves
(`operations`), live subscriptions, and a pool of native connections, one for each API key, with the
enqueues. A caller's request comes in; calls and frames of a native connection go out. The gateway
keeps no state of its own, and reaches the engine by those connections alone.
"""
