"""Cursors in the metadata store: two nodes that both think that they move one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.cluster.embedded import EmbeddedStore
from penstock.cluster.store import MetadataStore
from penstock.errors import Unavailable
from penstock.node.clock import ManualClock
from penstock.node.live.cursors import CursorPlace, Cursors

PLACE = CursorPlace(1, "me", 0)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[MetadataStore]:
    store = EmbeddedStore(tmp_path)
    yield store
    await store.close()


async def moved(cursors: Cursors, position: int) -> None:
    cursors.note(PLACE, position)
    await cursors.flush()


async def stored(store: MetadataStore) -> int | None:
    """As a node sees it that has had nothing to do with it."""
    found = await Cursors(store, ManualClock(0)).look(PLACE)
    return None if found is None else found.position


async def test_a_deposed_node_never_moves_it_again(store: MetadataStore) -> None:
    old, new = Cursors(store, ManualClock(0)), Cursors(store, ManualClock(0))
    await old.get(PLACE)
    await moved(old, 10)
    await new.get(PLACE)
    await moved(new, 50)
    for position in (11, 12, 60):
        await moved(old, position)
        assert not old.due
        assert await stored(store) == 50
    await moved(new, 51)
    assert await stored(store) == 51


async def test_it_is_moved_again_by_who_reads_it_again(store: MetadataStore) -> None:
    one, other = Cursors(store, ManualClock(0)), Cursors(store, ManualClock(0))
    await one.get(PLACE)
    await moved(one, 10)
    await other.get(PLACE)
    await moved(other, 50)
    one.note(PLACE, 11)  # is told that it was deposed before this is written
    found = await one.get(PLACE)
    assert found is not None
    assert found.position == 50
    await one.flush()
    assert await stored(store) == 50
    await moved(one, 52)
    assert await stored(store) == 52


async def test_a_deleted_cursor_is_written_again(store: MetadataStore) -> None:
    one, other = Cursors(store, ManualClock(0)), Cursors(store, ManualClock(0))
    await one.get(PLACE)
    for position, node in ((10, one), (20, other)):
        await moved(one, position)
        assert await node.delete(PLACE.topic, PLACE.name) == 1
        assert await stored(store) is None
        await moved(one, position + 1)
        assert await stored(store) == position + 1


class Answerless(EmbeddedStore):
    """Writes, and does not say so."""

    silent = False

    async def put(self, key: str, value: bytes, *, expected_revision: int | None = None) -> int:
        revision = await super().put(key, value, expected_revision=expected_revision)
        if self.silent:
            raise Unavailable("no answer")
        return revision


async def test_a_write_of_its_own_is_not_taken_for_that_of_another(tmp_path: Path) -> None:
    store, clock = Answerless(tmp_path), ManualClock(0)
    cursors = Cursors(store, clock)
    await cursors.get(PLACE)
    store.silent = True
    for position in (10, 11, 12):
        clock.advance(1)
        await moved(cursors, position)
    assert cursors.due
    store.silent = False
    await cursors.flush()
    await cursors.flush()
    assert not cursors.due
    assert await stored(store) == 12
    await moved(cursors, 13)
    assert await stored(store) == 13
    await store.close()
