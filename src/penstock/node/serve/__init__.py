"""A topic on this node: its partitions, its turns, and who is waiting for messages.

An enqueue comes in by `intake`, which hands its parts to partitions, here or elsewhere. A turn
takes the requests that have gathered, leases messages to consumers by the spine's rule over all
partitions, here and at other nodes, and hands out what was committed. One task owns all of it.
"""
