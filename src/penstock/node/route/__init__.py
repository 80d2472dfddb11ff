"""The way to a partition that another node serves.

`ports` says what a partition can be asked, wherever it is. The router knows who serves a partition,
sends errands there, which are requests for it, and lets them wait while nobody does.
"""
