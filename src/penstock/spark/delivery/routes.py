"""Which rows of a change file a sink gets: the routes of `penstock.propagation.route`, on Arrow.

Deltas are judged one by one. A *state* has a namespace and a vector, but neither an operation nor
headers: a route by one of those takes the vectors that a matching delta touched in this trigger,
each with its whole state, whatever else has touched it. A row that several routes take comes once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final, Self

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.model.delta import Op
from penstock.propagation.route import Route, RouteKind

_BY_DELTAS: Final = frozenset({RouteKind.OP, RouteKind.HEADER})
_KEY: Final = ("topic", "namespace", "vector_id")
_SEPARATOR: Final = "\x1f"


@dataclass(frozen=True, kw_only=True)
class Routes:
    """A sink's routes; none: everything."""

    routes: tuple[Route, ...] = ()

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Self:
        return cls(routes=tuple(Route.parse(text) for text in texts))

    @property
    def all(self) -> bool:
        return not self.routes or any(route.kind is RouteKind.ALL for route in self.routes)

    @property
    def judge_states_by_deltas(self) -> bool:
        return not self.all and any(route.kind in _BY_DELTAS for route in self.routes)

    def deltas(self, deltas: pa.Table) -> pa.Table:
        """The deltas that some route takes."""
        if self.all:
            return deltas
        return deltas.filter(_any(_delta_mask(route, deltas) for route in self.routes))

    def states(self, states: pa.Table, touching: pa.Table | None) -> pa.Table:
        """The states that some route takes; `touching` are all deltas of their trigger."""
        if self.all:
            return states
        masks = [_name_mask(r, states) for r in self.routes if r.kind not in _BY_DELTAS]
        judged = [r for r in self.routes if r.kind in _BY_DELTAS]
        if judged and touching is not None:
            taken = touching.filter(_any(_delta_mask(route, touching) for route in judged))
            masks.append(pc.is_in(vector_keys(states), value_set=vector_keys(taken)))
        return states.filter(_any(masks)) if masks else states.slice(0, 0)


def vector_keys(table: pa.Table) -> pa.Array:
    """One text per row that names its vector."""
    joined = pc.binary_join_element_wise(*(table[name] for name in _KEY), _SEPARATOR)
    return joined.combine_chunks()


def _any(masks: Iterable[Any]) -> Any:
    return reduce(pc.or_, masks)


def _delta_mask(route: Route, deltas: pa.Table) -> Any:
    if route.kind is RouteKind.OP:
        return pc.equal(deltas["op"], pa.scalar(int(Op[route.value]), pa.int8()))
    if route.kind is RouteKind.HEADER:
        found = [_header(data, route.name) == route.value for data in deltas["headers"].to_pylist()]
        return pa.chunked_array([pa.array(found, pa.bool_())])
    return _name_mask(route, deltas)


def _name_mask(route: Route, table: pa.Table) -> Any:
    if route.kind is RouteKind.NAMESPACE:
        return pc.equal(table["namespace"], route.value)
    assert route.kind is RouteKind.VECTOR, route
    same = pc.equal(table["namespace"], route.name)
    return pc.and_(same, pc.equal(table["vector_id"], route.value))


def _header(data: bytes | None, name: str) -> Any:
    """A header of a message; what is no map has none."""
    try:
        found = msgspec.msgpack.decode(data) if data else {}
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return found.get(name) if isinstance(found, dict) else None
