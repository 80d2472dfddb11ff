"""The replication core: epochs, promises, quorums, commit and credit, without I/O.

Start with `rules`, which says why it is safe; `replica` is what a driver talks to.
"""
