"""The administrative calls of a node, one function each.

A call is named, has typed arguments, and answers a map; `table` finds, checks and audits it. Some
fan out to the nodes that serve a topic's partitions and gather what these answer. Lists come by
the page.
"""
