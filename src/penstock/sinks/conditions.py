"""Conditions on metadata: which vectors a search is about.

A condition is a mapping, as vector stores write them:

    {"lang": "de", "price": {"$gte": 5, "$lt": 10}, "maker.country": {"$in": ["at", "ch"]}}

All of it must hold. A name is that of a value in the metadata; a dot leads into a map, or with a
number into an array, and `\\.` is a dot in a name. A value is held against text, whole numbers,
floats, booleans or null. An array matches if one of its items does; one with arrays in it never
does. Numbers are compared with numbers, as floats unless both are whole, and text with text by its
code points; what is of another kind is neither equal nor less nor more. `$ne`, `$nin` and `$not`
hold where their opposite does not, so also where there is no such value.

`read` checks a mapping. What it returns says of metadata whether they match, and says the same as a
filter for LanceDB. Names and values stand in that as literals only. Most comparisons go by the JSON
text of a value: that is several times as fast as LanceDB's own comparisons (JSONPath), which are
left for what texts cannot decide.
"""

from __future__ import annotations

import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import isfinite
from typing import Any, Final

import msgspec

from penstock.errors import InvalidArgument

Scalar = str | int | float | bool | None
COMPARISONS_MAX: Final = 100  # of one condition, each value of a list counted
LEVELS_MAX: Final = 8  # of $and, $or and $not inside each other
NAME_BYTES_MAX: Final = 1024
WHOLE_MIN, WHOLE_MAX = -(1 << 63), (1 << 64) - 1
_EXACT: Final = 1 << 53  # whole numbers below it are the same as floats
_COMPARE: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "$eq": operator.eq, "$lt": operator.lt, "$lte": operator.le, "$gt": operator.gt,
    "$gte": operator.ge,
}  # fmt: skip
_SIGNS: Final = {"$eq": "=", "$lt": "<", "$lte": "<=", "$gt": ">", "$gte": ">="}
_OPPOSITES: Final = {"$ne": "$eq", "$nin": "$in"}
OPERATORS: Final = ("$eq", "$ne", "$lt", "$lte", "$gt", "$gte", "$in", "$nin", "$exists")
LOGIC: Final = ("$and", "$or", "$not")
_MISSING: Final = object()
# JSON texts of values that are no arrays, or arrays without another one anywhere inside.
_NO_ARRAYS: Final = r'^(?:[^\[]|\[(?:"(?:\\.|[^"\\])*"|[^"\[])*$)'
_ITEM: Final = re.compile(r"\+?[0-9]+")


class Condition(ABC):
    @abstractmethod
    def matches(self, metadata: Any) -> bool: ...

    @abstractmethod
    def sql(self) -> str:
        """For the column `metadata` of a LanceDB table; it may be null where it does not hold."""


def read(where: Mapping[str, Any]) -> Condition:
    """The condition that a mapping says; `InvalidArgument` names what is wrong in it."""
    return _Reader().all_of(where, "where", 0)


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


@dataclass(frozen=True)
class _All(Condition):
    parts: Sequence[Condition]

    def matches(self, metadata: Any) -> bool:
        return all(part.matches(metadata) for part in self.parts)

    def sql(self) -> str:
        return _joined(" AND ", (part.sql() for part in self.parts))


@dataclass(frozen=True)
class _Any(Condition):
    parts: Sequence[Condition]

    def matches(self, metadata: Any) -> bool:
        return any(part.matches(metadata) for part in self.parts)

    def sql(self) -> str:
        return _joined(" OR ", (part.sql() for part in self.parts))


@dataclass(frozen=True)
class _Not(Condition):
    part: Condition

    def matches(self, metadata: Any) -> bool:
        return not self.part.matches(metadata)

    def sql(self) -> str:
        return f"({self.part.sql()} IS NOT TRUE)"


@dataclass(frozen=True)
class _Exists(Condition):
    path: tuple[str, ...]

    def matches(self, metadata: Any) -> bool:
        return _found(metadata, self.path) is not _MISSING

    def sql(self) -> str:
        return f"({_node(self.path)} IS NOT NULL)"


@dataclass(frozen=True)
class _Compare(Condition):
    """Whether the value, or an item of it, is `op` one of the `values`."""

    path: tuple[str, ...]
    op: str
    values: Sequence[Scalar]

    def matches(self, metadata: Any) -> bool:
        found = _found(metadata, self.path)
        items = _items(found) if isinstance(found, list) else (found,)
        compare = _COMPARE[self.op]
        for value in self.values:
            for item in items:
                if _compared(compare, item, value):
                    return True
        return False

    def sql(self) -> str:
        node = _node(self.path)
        text = f"json_extract({node}, '$')"
        by_path = _joined(" OR ", (self._by_path(node, value) for value in self.values))
        if not all(map(self._is_told_by_text, self.values)):
            return f"(regexp_like({text}, {quoted(_NO_ARRAYS)}) AND {by_path})"
        by_text = [self._by_text(text, value) for value in self.values]
        in_array = f"starts_with({text}, '[') AND regexp_like({text}, {quoted(_NO_ARRAYS)})"
        return _joined(" OR ", [*by_text, f"({in_array} AND {by_path})"])

    def _is_told_by_text(self, value: Scalar) -> bool:
        if isinstance(value, int) and not isinstance(value, bool):
            return -_EXACT < value < _EXACT
        return isinstance(value, float) or self.op == "$eq"

    def _by_text(self, text: str, value: Scalar) -> str:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"{text} = {quoted(_json(value))}"
        number = quoted(repr(float(value)))
        return f"TRY_CAST({text} AS DOUBLE) {_SIGNS[self.op]} CAST({number} AS DOUBLE)"

    def _by_path(self, node: str, value: Scalar) -> str:
        sign = "==" if self.op == "$eq" else _SIGNS[self.op]
        # JSONPath has no empty text here, but only that is less than a zero.
        said = '< "\\u0000"' if value == "" else f"{sign} {_path_literal(value)}"
        return f"json_exists({node}, {quoted(f'$[*]?(@ {said})')})"


def _joined(word: str, parts: Iterable[str]) -> str:
    return f"({word.join(parts)})"


def _node(path: Sequence[str]) -> str:
    found = "metadata"
    for name in path:
        found = f"json_get({found}, {quoted(name)})"
    return found


def _json(value: Scalar) -> str:
    return msgspec.json.encode(value).decode()


def _path_literal(value: Scalar) -> str:
    """A value in JSONPath. A float begins with its point: LanceDB takes the digits before one for
    a whole number, and then knows no more."""
    if not isinstance(value, float):
        return _json(value)
    sign, digits, exponent = Decimal(repr(value)).as_tuple()
    assert isinstance(exponent, int)
    text = "".join(map(str, digits))
    return f"{'-' if sign else ''}.{text}e{exponent + len(text)}"


def _found(metadata: Any, path: Sequence[str]) -> Any:
    for name in path:
        if isinstance(metadata, dict):
            metadata = metadata.get(name, _MISSING)
        elif isinstance(metadata, list) and _ITEM.fullmatch(name):
            metadata = metadata[int(name)] if int(name) < len(metadata) else _MISSING
        else:
            return _MISSING
    return metadata


def _items(found: list[Any]) -> Sequence[Any]:
    return () if any(map(_holds_array, found)) else found


def _holds_array(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_array, value.values()))
    return isinstance(value, list)


def _compared(compare: Callable[[Any, Any], bool], held: Any, value: Scalar) -> bool:
    if _kind(held) is not _kind(value):
        return False
    if isinstance(held, float) or isinstance(value, float):
        return compare(float(held), float(value))  # type: ignore[arg-type]
    return compare(held, value)


def _kind(value: Any) -> type:
    return float if type(value) is int else type(value)


# --- reading a mapping ---


class _Reader:
    def __init__(self) -> None:
        self._comparisons = 0

    def all_of(self, where: Any, field: str, level: int) -> Condition:
        if not isinstance(where, Mapping):
            raise InvalidArgument(f"{field} must be a mapping of names to values", field=field)
        if level > LEVELS_MAX:
            raise InvalidArgument(
                f"{field} nests more than {LEVELS_MAX} deep", field=field, limit=LEVELS_MAX
            )
        if not where:
            raise InvalidArgument(f"{field} says nothing", field=field)
        parts = [self._part(name, said, f"{field}.{name}", level) for name, said in where.items()]
        return parts[0] if len(parts) == 1 else _All(parts)

    def _part(self, name: Any, said: Any, field: str, level: int) -> Condition:
        if not isinstance(name, str):
            raise InvalidArgument(f"{field}: a name is text", field=field)
        if name == "$not":
            return _Not(self.all_of(said, field, level + 1))
        if name in ("$and", "$or"):
            parts = [self.all_of(one, field, level + 1) for one in _list(said, field)]
            return _All(parts) if name == "$and" else _Any(parts)
        if name.startswith("$"):
            raise _unknown(name, LOGIC, field)
        path = _path(name, field)
        if not isinstance(said, Mapping):
            return self._compare(path, "$eq", said, field)
        if not said:
            raise InvalidArgument(f"{field} says nothing", field=field)
        return _All([self._compare(path, op, value, field) for op, value in said.items()])

    def _compare(self, path: tuple[str, ...], op: Any, value: Any, field: str) -> Condition:
        if op not in OPERATORS:
            raise _unknown(op, OPERATORS, field)
        if op in _OPPOSITES:
            return _Not(self._compare(path, _OPPOSITES[op], value, field))
        if op == "$exists":
            if not isinstance(value, bool):
                raise InvalidArgument(f"{field}: $exists takes true or false", field=field)
            return _Exists(path) if value else _Not(_Exists(path))
        values = _list(value, field) if op == "$in" else [value]
        self._count(len(values), field)
        op = "$eq" if op == "$in" else op
        return _Compare(path, op, [_scalar(one, op, field) for one in values])

    def _count(self, more: int, field: str) -> None:
        self._comparisons += more
        if self._comparisons > COMPARISONS_MAX:
            raise InvalidArgument(
                f"a condition compares with at most {COMPARISONS_MAX} values",
                field=field,
                limit=COMPARISONS_MAX,
            )


def _unknown(op: Any, known: Sequence[str], field: str) -> InvalidArgument:
    return InvalidArgument(f"{field}: {op!r} is none of {', '.join(known)}", field=field)


def _list(value: Any, field: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple) or not value:
        raise InvalidArgument(f"{field} takes a list that is not empty", field=field)
    return value


def _scalar(value: Scalar, op: str, field: str) -> Scalar:
    if not isinstance(value, str | int | float | None):
        raise InvalidArgument(
            f"{field} is compared with text, numbers, booleans or null, not {type(value).__name__}",
            field=field,
        )
    if op != "$eq" and (value is None or isinstance(value, bool) or value == ""):
        raise InvalidArgument(f"{field}: {op} takes a number or text", field=field)
    if isinstance(value, int) and not WHOLE_MIN <= value <= WHOLE_MAX:
        raise InvalidArgument(
            f"{field}: {value} does not fit into 64 bits", field=field, limit=WHOLE_MAX
        )
    if isinstance(value, float) and not isfinite(value):
        raise InvalidArgument(f"{field}: {value} is not finite", field=field)
    if isinstance(value, str):
        _check_text(value, field)
    return value


def _check_text(text: str, field: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{field} is not UTF-8: {error.reason}", field=field) from error


def _path(name: str, field: str) -> tuple[str, ...]:
    _check_text(name, field)
    if not 1 <= len(name.encode()) <= NAME_BYTES_MAX:
        raise InvalidArgument(
            f"{field}: a name has 1 to {NAME_BYTES_MAX} bytes", field=field, limit=NAME_BYTES_MAX
        )
    parts = re.split(r"(?<!\\)\.", name)
    return tuple(part.replace("\\.", ".") for part in parts)
