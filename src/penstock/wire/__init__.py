"""The native protocol: frames and control messages, without any I/O.

Bytes come in and frames go out (`frame`, `compression`), a frame's payload becomes a control
message and the data behind it (`messages`, `supply`), and frames that are sent in one turn are
gathered (`outbox`). Clients and nodes use the same code, and so do nodes among each other.
`limits` says what a message may ask for at most.
"""
