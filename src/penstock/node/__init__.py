"""A node: it performs what the pure cores decide, on real disks, sockets and clocks.

The rooms, from the outside in: `session` speaks with one client, `calls` answers what is asked
about the node, `upkeep` sweeps and measures; `engine` holds the parts together, `lifecycle` starts
and stops them, and `cluster_of_one` is the cluster of a node that is alone. Inside, `serve` runs a
topic's turns over its partitions, `write` turns requests into batches of the log, `atomic` writes
one batch into several partitions, `route` reaches partitions of other nodes, `replica` keeps one
copy of a partition, `cluster` knows the other nodes, `live` pushes deltas to subscribers and
`hosted` to sinks, `storage` syncs, `door` bounds what callers may cost, `observe` writes logs and
counts.
"""
