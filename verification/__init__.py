"""What verifies Penstock without being part of it: nothing that is shipped imports it.

`model` explores the replication rules, `simulation` runs whole clusters from seeds, and `fuzz`
sends hostile bytes to nodes and clients. `checkers` says what must hold of every history that
`events` tells, with `replay` as a second reading of the log. `reference` folds deltas slowly, and
`determinism` takes one log to a lake by three ways.
"""
