"""The way to a partition that another node serves.

`ports` says what a partition can be asked, wherever it is. `errands` are requests for partitions of
other nodes, with their outcomes; the router knows who serves a partition, sends errands there, and
lets them wait while nobody does.
"""
