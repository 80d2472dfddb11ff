"""Vectors of a delta topic: changed by deltas, folded from the log, and followed as they change.

`deltas` is the public object. A `writer` knows the last delta of each vector it changes
and lays out many deltas at once, and a `fold` makes vectors of a partition's log through the
kernels of `penstock.propagation`. A `subscription` is what nodes release, in causal order and
through failures without a gap. Everything is written and read through the topic's own handle.
"""
