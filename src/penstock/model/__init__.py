"""What everybody else speaks of: batches and their columns, deltas, topics, ids and their limits.

The formats that are stored and sent are here: `columns` and `batch` for a log, `entries` for what
is enqueued and handed out, `delta` for a change of a vector. All of it
is values and functions of values. It imports nothing of Penstock but the errors.
"""
