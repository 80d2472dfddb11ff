"""Message ids of a whole answer, and which of them are not new."""

from __future__ import annotations

from typing import NamedTuple

from penstock.wire.answers import ids_of
from penstock.wire.messages import Enqueued


class Written(NamedTuple):
    """Where one entry of a request went."""

    message_id: str
    duplicate: bool


def written_ids(enqueued: Enqueued, count: int) -> tuple[list[str], list[int]]:
    """The id of every entry of a request, and the positions of duplicates."""
    return ids_of(enqueued, count), [known.index for known in enqueued.duplicates]
