"""Which deltas go to which sink: a mask over a batch's columns.

A route is one condition: all deltas, those of a vector or of a namespace, of an operation, or of
messages with a header. A sink has any number of routes and gets a delta once if any of them holds;
without routes it gets everything. As text:

    *    vector=<namespace>/<vector_id>    namespace=<name>    op=<name>    header:<name>=<value>
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidArgument
from penstock.model.delta import Op, vector_hash
from penstock.model.delta_batch import DeltaBatch
from penstock.propagation.fold.releases import ReleasedRows

ALL: Final = "*"
_HEADER: Final = "header:"

Mask = NDArray[np.bool_]


class RouteKind(Enum):
    ALL = "all"
    VECTOR = "vector"
    NAMESPACE = "namespace"
    OP = "op"
    HEADER = "header"


class DeltaRoute(msgspec.Struct, frozen=True, kw_only=True):
    """`name` is a vector's namespace or a header's name; `value` what has to be equal."""

    kind: RouteKind = RouteKind.ALL
    value: str = ""
    name: str = ""

    @staticmethod
    def parse(text: str) -> DeltaRoute:
        if text == ALL:
            return DeltaRoute()
        left, equals, value = text.partition("=")
        if not equals or not value:
            raise _refused(text)
        if left.startswith(_HEADER) and len(left) > len(_HEADER):
            return DeltaRoute(kind=RouteKind.HEADER, name=left.removeprefix(_HEADER), value=value)
        if left == "vector":
            namespace, slash, vector_id = value.partition("/")
            if not slash or not namespace or not vector_id:
                raise _refused(text)
            return DeltaRoute(kind=RouteKind.VECTOR, name=namespace, value=vector_id)
        if left == "namespace":
            return DeltaRoute(kind=RouteKind.NAMESPACE, value=value)
        if left == "op" and value.upper() in Op.__members__:
            return DeltaRoute(kind=RouteKind.OP, value=value.upper())
        raise _refused(text)

    def __str__(self) -> str:
        match self.kind:
            case RouteKind.ALL:
                return ALL
            case RouteKind.VECTOR:
                return f"vector={self.name}/{self.value}"
            case RouteKind.HEADER:
                return f"{_HEADER}{self.name}={self.value}"
            case _:
                return f"{self.kind.value}={self.value}"

    def mask(self, batch: DeltaBatch) -> Mask:
        match self.kind:
            case RouteKind.ALL:
                return np.ones(len(batch), np.bool_)
            case RouteKind.VECTOR:
                wanted = np.frombuffer(vector_hash(self.name, self.value), "<u8")
                same: Mask = (batch.vector == wanted).all(axis=1)
                return same
            case RouteKind.OP:
                return np.asarray(batch.op == Op[self.value])
            case RouteKind.NAMESPACE:
                return self._namespace(batch)
            case RouteKind.HEADER:
                return self._header(batch)

    def _namespace(self, batch: DeltaBatch) -> Mask:
        wanted = self.value.encode()
        found = np.asarray(batch.fixed["namespace_bytes"] == len(wanted))
        rows = np.flatnonzero(found)
        found[rows] = [namespace == wanted for namespace, _ in batch.take(rows).names()]
        return found

    def _header(self, batch: DeltaBatch) -> Mask:
        found = np.zeros(len(batch), np.bool_)
        if batch.headers is None:
            return found
        for row in np.flatnonzero(np.diff(batch.headers.offsets)).tolist():
            found[row] = _headers(batch.headers[row]).get(self.name) == self.value
        return found


Routes = tuple[DeltaRoute, ...]  # none: everything


def routed(batch: DeltaBatch, routes: Sequence[DeltaRoute]) -> Mask:
    """Which rows a sink with these routes gets."""
    if not routes:
        return np.ones(len(batch), np.bool_)
    found = np.zeros(len(batch), np.bool_)
    for route in routes:
        found |= route.mask(batch)
    return found


def wanted(rows: ReleasedRows, routes: Routes) -> ReleasedRows:
    if not routes:
        return rows
    mask = routed(rows.batch, routes)
    return rows if mask.all() else rows.take(mask)


def _headers(data: bytes) -> dict[str, Any]:
    """A message's headers; what is no map has none."""
    try:
        found = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _refused(text: str) -> InvalidArgument:
    return InvalidArgument(
        f"route {text!r} is none of *, vector=namespace/id, namespace=name, op=name,"
        " header:name=value",
        field="route",
    )
