"""The replication core: epochs, promises, quorums, commit and credit, without I/O.

Start with `rules`, which says why it is safe. A driver has one `replica` for each partition: it
hands over records, messages, reports of its disk and ticks, each with the time, and performs the
`effects` that come back, in their order. The replica puts one of three in charge: the `follower` of
another's log, a `takeover` of the epoch, or the `coordinator`, which has a `sender` for
every reader. `assignment` is who holds a partition, `facts` what a log holds.
"""
