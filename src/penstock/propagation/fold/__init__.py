"""The fold of one partition of a log: deltas go in, releases and states of vectors come out.

A driver talks to `propagator`, which tells the whole way: `order` admits and orders by columns with
the `ledger` of what was released and of what lacks a cause, `merge` brings what is released into
the states of vectors, which are `registers` and operations, and `row_fold` does all of that for a
few rows at once. `snapshot` makes a fold into bytes and back, `releases` remembers the order of
release without the states, and `table` holds the columns of all of them.
"""
