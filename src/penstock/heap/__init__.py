"""The heap core: priority order, leases, retries and deduplication, without I/O.

A `Heap` is the state of one partition of a queue. Decoded batches of its log come in by `apply`,
the only way to change it; answers to questions go out: which messages are best, which leases are
held or over, which entries are here already. It sees no clock, no file and no task, so the same
batches give the same state on every replica. A `Spine` picks the best messages over several heaps.
"""
