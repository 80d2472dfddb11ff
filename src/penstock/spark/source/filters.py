"""What of a query's conditions the reader takes on itself.

Conditions on topic, partition and sequence choose ranges, exactly; on time they narrow ranges down
by the log's own order, and Spark looks at the rows that are left; on a delta's namespace they are
applied while the rows are made. Everything else stays with Spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from penstock.spark.source.ranges import Range

_END: Final = 1 << 63
_NEVER_NULL: Final = frozenset({"topic", "partition", "sequence", "time", "namespace"})


@dataclass(frozen=True)
class Selection:
    """Bounds are inclusive. None: any."""

    topics: frozenset[str] | None = None
    namespaces: frozenset[str] | None = None
    partition: tuple[int, int] = (0, _END)
    partitions: frozenset[int] | None = None
    sequence: tuple[int, int] = (1, _END)
    time_ms: tuple[int, int] = (-_END, _END)

    def ranges(self, among: Iterable[Range]) -> list[Range]:
        """What the selection leaves of ranges."""
        found = []
        for whole in among:
            if self.topics is not None and whole.topic not in self.topics:
                continue
            if self.partitions is not None and whole.partition not in self.partitions:
                continue
            if not self.partition[0] <= whole.partition <= self.partition[1]:
                continue
            first = max(whole.first, self.sequence[0])
            last = min(whole.last, self.sequence[1])
            if first <= last:
                found.append(replace(whole, first=first, last=last))
        return found


def push(filters: Sequence[Filter], columns: Iterable[str]) -> tuple[Selection, list[Filter]]:
    """The selection, and the conditions that Spark must still check."""
    known = set(columns)
    selection, left = Selection(), []
    for condition in filters:
        name = _column(condition)
        pushed = _push(selection, condition, name) if name in known else None
        if pushed is None or name == "time":
            left.append(condition)
        selection = pushed or selection
    return selection, left


def _push(selection: Selection, condition: Filter, name: str) -> Selection | None:
    """The selection with a condition added; None if it is none of ours."""
    if isinstance(condition, IsNotNull):
        return selection if name in _NEVER_NULL else None
    values = _values(condition)
    if name in ("topic", "namespace"):
        return None if values is None else _among(selection, name, frozenset(values))
    if name == "partition" and values is not None:
        both = frozenset(values)
        old = selection.partitions
        return replace(selection, partitions=both if old is None else old & both)
    if name in ("partition", "sequence", "time"):
        bounds = _bounds(condition, time=name == "time")
        if bounds is None:
            return None
        field = "time_ms" if name == "time" else name
        low, high = getattr(selection, field)
        narrowed: dict[str, Any] = {field: (max(low, bounds[0]), min(high, bounds[1]))}
        return replace(selection, **narrowed)
    return None


def _among(selection: Selection, name: str, values: frozenset[str]) -> Selection:
    field = name + "s"
    old = getattr(selection, field)
    narrowed: dict[str, Any] = {field: values if old is None else old & values}
    return replace(selection, **narrowed)


def _column(condition: Filter) -> str:
    path: tuple[str, ...] = getattr(condition, "attribute", ())
    return path[0] if len(path) == 1 else ""


def _values(condition: Filter) -> tuple[Any, ...] | None:
    """The values that a condition allows, if it names them."""
    if isinstance(condition, In):
        found = tuple(condition.value)
    elif isinstance(condition, EqualTo | EqualNullSafe):
        found = (condition.value,)
    else:
        return None
    return None if None in found else found


def _bounds(condition: Filter, *, time: bool) -> tuple[int, int] | None:
    """The inclusive bounds of a comparison; of a time in ms, rounded outwards."""
    value = getattr(condition, "value", None)
    low, high = (_floor_ms(value), _floor_ms(value)) if time else (value, value)
    if not isinstance(low, int) or not isinstance(high, int):
        return None
    if isinstance(condition, EqualTo | EqualNullSafe):
        return low, high
    step = 0 if time else 1
    if isinstance(condition, GreaterThan):
        return low + step, _END
    if isinstance(condition, GreaterThanOrEqual):
        return low, _END
    if isinstance(condition, LessThan):
        return -_END, high - step
    if isinstance(condition, LessThanOrEqual):
        return -_END, high
    return None


def _floor_ms(value: Any) -> int | None:
    if not isinstance(value, datetime):
        return None
    known = value if value.tzinfo else value.replace(tzinfo=UTC)
    return int(known.timestamp() * 1000 // 1)
