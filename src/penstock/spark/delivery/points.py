"""Delivery's named crash points (`penstock.log.crash`), in the order of a write's life."""

from typing import Final

DELIVERY_POINTS: Final = (
    "delivery.attempt.saved",  # the range of a coalesced write is on file, nothing is written
    "delivery.write.before",
    "delivery.write.after",  # the sink holds it, the cursor does not say so
    "delivery.rejected.before",  # the rest is written, the rejected rows are nowhere
    "delivery.rejected.after",  # they are dead letters, the cursor does not say so
    "delivery.cursor.before",
    "delivery.cursor.after",
    "delivery.prune.after",
)
