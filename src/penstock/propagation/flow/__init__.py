"""How deltas flow into a log and released ones out to subscribers and sinks.

`lanes` has the queue in front of logs, and `outbox` what waits for one subscriber; both are bounded
and served by lanes, so that urgent changes overtake others, but never one of their own vector. A
window makes several changes of a vector one, `route` selects who gets what, and `rate` says how
fast. Everything is told the time and decides by it alone.
"""
