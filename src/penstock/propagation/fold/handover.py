"""What a fold knows besides its columns, so that another process goes on with those.

Where the columns of a fold lie in a space that processes share, handing it over takes little: how
many rows each table has, what waits, and some numbers. `settled` gives that when a feed is through,
and `resumed` makes the fold of it, over the same space. What is a function of the columns (ranks of
origins, free rows, codes of namespaces) is made anew.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.errors import Corruption, FailedPrecondition
from penstock.propagation.fold.ledger import WaitingDelta
from penstock.propagation.fold.propagator import Propagator
from penstock.propagation.fold.table import KeyTable, Space, Table
from penstock.propagation.options import PropagationOptions


def settled(fold: Propagator) -> dict[str, Any]:
    """Plain numbers, texts and bytes. The columns are whole when this returns."""
    if fold.paused:
        raise FailedPrecondition("a paused fold is not handed over: resolve what is missing first")
    fold.merge.reserve()
    fold.merge.operations.settle()
    ledger = fold.ledger
    return {
        "dimensions": fold.dimensions,
        "fold": [fold.sequence, fold.ordinal, fold.saved],
        "tables": [table.count for table in _tables(fold)],
        "keys": [[len(keys), keys.bits] for keys in _keys(fold)],
        "names": ledger.names.facts(),
        "words": fold.merge.registers.words.end,
        "ledger": ledger.facts(),
        "pending": [_facts_of(w) for w in fold.waitlist.arrivals if not w.done],
    }


def resumed(
    facts: dict[str, Any], options: PropagationOptions | None, *, space: Space
) -> Propagator:
    """The fold that was settled; `Corruption` if the space has not all of its columns."""
    fold = Propagator(facts["dimensions"], options, space=space)
    fold.sequence, fold.ordinal, fold.saved = facts["fold"]
    for table, count in zip(_tables(fold), facts["tables"], strict=True):
        table.count = count
    for keys, (count, bits) in zip(_keys(fold), facts["keys"], strict=True):
        keys.attach(count, bits)
    tables = [*_tables(fold), *(keys.table for keys in _keys(fold))]
    if any(table.count > table.capacity for table in tables):
        raise Corruption("columns are shorter than the fold that was left in them")
    ledger, registers = fold.ledger, fold.merge.registers
    ledger.names.attach(facts["names"])
    ledger.rank_origins()
    registers.words.end = facts["words"]
    registers.free = np.flatnonzero(registers.stamps.rows("vector") == 0).tolist()
    registers.sparse.free = np.flatnonzero(registers.sparse.table.rows("vector") == 0).tolist()
    fold.waitlist.look()
    for told in facts["pending"]:
        waiting, key = _waiting_of(told)
        fold.waitlist.wait(waiting, key)
    ledger.resume(facts["ledger"])
    return fold


def _tables(fold: Propagator) -> list[Table]:
    registers = fold.merge.registers
    own = [registers.table, registers.stamps, registers.sparse.table, registers.asides]
    return [fold.ledger.chains.table, fold.merge.table, *own]


def _keys(fold: Propagator) -> list[KeyTable]:
    ledger = fold.ledger
    return [ledger.vectors, ledger.origins, ledger.chains.further, ledger.ids]


def _facts_of(w: WaitingDelta) -> list[Any]:
    return [
        w.sequence, w.log_time_ms, w.id, w.parent, w.vector, w.chain, w.counter, w.others,
        w.payload, w.headers, w.key,
    ]  # fmt: skip


def _waiting_of(facts: list[Any]) -> tuple[WaitingDelta, Any]:
    *fields, others, payload, headers, key = facts
    own: list[Any] = [-1, -1, *fields, [(chain, counter) for chain, counter in others]]
    waiting = WaitingDelta(*own)
    waiting.payload, waiting.headers = payload, headers
    return waiting, (key[0], key[1])
