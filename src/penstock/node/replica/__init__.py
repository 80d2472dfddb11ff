"""One copy of a partition's log, in any role.

The host drives the replica of `penstock.replication`: it feeds it events and performs its effects
in the order in which they come. It applies committed records to the heap, sends the log to
followers, receives it from a coordinator, and repairs or replaces a damaged copy.
"""
