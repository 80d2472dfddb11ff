"""What a subscriber asked for, within the node's bounds."""

from __future__ import annotations

import msgspec

from penstock.node.live.outgoing import Routes


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    routes: Routes = ()
    cursor: str = ""
    credit_entries: int = 10_000
    credit_bytes: int = 8 << 20
    batch_max: int = 1000  # rows of one sending
    batch_ms: int = 0  # how long the first of a batch may wait for others
    batch_rows: int = 1000  # … unless there are so many
    read_rows: int = 1000  # rows of one sending while it reads on from the log
    coalesce_ms: int = 0
    hosted: bool = False  # a sink of this node
    needs_fold: bool = False  # it looks at states: not while a thread has the fold
    in_order: bool = False  # never by urgency: all that waits is sent together
    outbox_entries: int = 10_000
    outbox_bytes: int = 8 << 20
    ageing_ms: int = 10_000
    rate_min: float = 1000.0
    rate_max: float = 1_000_000.0
