"""One connection, from its greeting to its end.

Frames come in through the inbox of `door`; what they ask for goes to `write`, `serve`, `atomic`
or `calls`, and answers and streams go out. A session knows nothing of disks or of replication.
"""
