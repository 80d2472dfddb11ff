"""From a request to batches of the log, and from a commit to its answer.

The enqueuer and the settler turn requests into records of a partition's journal. Nothing in this
room knows of sockets or of other nodes.
"""
