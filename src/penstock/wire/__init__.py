"""The native protocol: frames and control messages, without any I/O.

Bytes come in and frames go out (`frame`), a frame's payload becomes a control message and the data
behind it (`messages`), and frames that are sent in one turn are gathered. Clients and nodes use the
same code, and so do nodes among each other.
"""
