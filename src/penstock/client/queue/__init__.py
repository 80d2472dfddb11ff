"""Messages of a topic: put, leased, settled, and read back.

A put goes from `entries` (values to columns) through the `producer` (puts that share a request,
and the key that makes a retry safe) to the link. What a consumer receives are `leases`.
`messages` shows what is in the queue, dead or in the log without leasing it. All of them share one
handle of their topic, which ends and extends leases, and reach nodes only through its link.
"""
