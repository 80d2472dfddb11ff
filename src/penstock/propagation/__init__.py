"""The propagation core: from deltas as they arrive to the states of vectors and to subscribers.

`fold` is a function of the log: it takes stretches of deltas and says what they release, refuse and
change. `flow` is what stands before a log and behind a fold: queues in lanes, windows, rates
and routes. Both are handed their events and their time, and do no I/O; nodes, pipelines
and clients drive the very same code. `options` are what either may be told.
"""
