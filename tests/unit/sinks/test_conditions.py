"""Conditions on metadata: what they mean, that LanceDB says the same, and what is refused."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lancedb
import msgspec
import pyarrow as pa
import pytest

from penstock.errors import InvalidArgument
from penstock.sinks import conditions
from penstock.sinks.index import JSON

SHOE: dict[str, Any] = {
    "lang": "de", "price": 9.5, "stock": 3, "sale": True, "gone": None, "tags": ["new", "red", 7],
    "maker": {"name": "O'Neill \"&\" Sons", "sites": [{"city": "Zürich"}]}, "a.b": 1, "": 0,
    "grid": [[1, 2], 3],
}  # fmt: skip


@pytest.mark.parametrize(
    "where",
    [
        {"lang": "de"}, {"lang": {"$ne": "en"}}, {"lang": {"$in": ["en", "de"]}},
        {"lang": {"$gte": "d", "$lt": "e"}}, {"price": {"$gt": 9, "$lte": 9.5}}, {"stock": 3.0},
        {"sale": True}, {"sale": {"$ne": 1}}, {"gone": None}, {"gone": {"$exists": True}},
        {"absent": {"$exists": False}}, {"absent": {"$ne": None}}, {"absent": {"$nin": ["x"]}},
        {"tags": "red"}, {"tags": {"$in": ["blue", 7]}}, {"tags": {"$gt": 6}}, {"tags.1": "red"},
        {"maker.name": "O'Neill \"&\" Sons"}, {"maker.sites.0.city": "Zürich"}, {"a\\.b": 1},
        {"$or": [{"lang": "en"}, {"price": {"$lt": 10}}]}, {"$not": {"lang": "en"}},
        {"$and": [{"lang": "de"}, {"stock": {"$gte": 3}}]}, {"grid": {"$ne": 3}}, {"grid.0": 2},
    ],
)  # fmt: skip
def test_it_matches(where: dict[str, Any]) -> None:
    assert conditions.read(where).matches(SHOE)
    assert not conditions.read({"$not": where}).matches(SHOE)


@pytest.mark.parametrize(
    "where",
    [
        {"lang": "en"}, {"price": "9.5"}, {"stock": {"$gt": "2"}}, {"sale": 1}, {"sale": "true"},
        {"gone": 0}, {"absent": None}, {"absent": {"$lt": 5}}, {"tags": {"$nin": ["red"]}},
        {"tags.7": "red"}, {"lang": "de", "stock": 4}, {"maker": "O'Neill"}, {"a.b": 1},
        {"grid": 1}, {"lang.0": "d"},
    ],
)  # fmt: skip
def test_it_does_not_match(where: dict[str, Any]) -> None:
    assert not conditions.read(where).matches(SHOE)


def test_without_metadata_only_what_is_denied_holds() -> None:
    assert not conditions.read({"a": None}).matches(None)
    assert conditions.read({"a": {"$ne": 1}}).matches(None)


@pytest.mark.parametrize(
    ("where", "field", "limit"),
    [
        (["lang"], "where", None),
        ({}, "where", None),
        ({"lang": {}}, "where.lang", None),
        ({"lang": {"$like": "d%"}}, "where.lang", None),
        ({"$xor": []}, "where.$xor", None),
        ({"$or": []}, "where.$or", None),
        ({"$or": {"a": 1}}, "where.$or", None),
        ({"$or": [1]}, "where.$or", None),
        ({1: 2}, "where.1", None),
        ({"": 2}, "where.", conditions.NAME_BYTES_MAX),
        ({"x" * 1025: 2}, "where." + "x" * 1025, conditions.NAME_BYTES_MAX),
        ({"lang": b"de"}, "where.lang", None),
        ({"lang": ["de"]}, "where.lang", None),
        ({"lang": {"$in": "de"}}, "where.lang", None),
        ({"lang": {"$in": ["x"] * 101}}, "where.lang", conditions.COMPARISONS_MAX),
        ({"lang": {"$exists": 1}}, "where.lang", None),
        ({"price": {"$lt": None}}, "where.price", None),
        ({"price": {"$lt": True}}, "where.price", None),
        ({"price": {"$gte": ""}}, "where.price", None),
        ({"price": float("nan")}, "where.price", None),
        ({"price": 2**64}, "where.price", conditions.WHOLE_MAX),
        ({"lang": "\ud800"}, "where.lang", None),
    ],
)
def test_what_is_wrong_is_named(where: Any, field: str, limit: Any) -> None:
    with pytest.raises(InvalidArgument) as refused:
        conditions.read(where)
    assert (refused.value.field, refused.value.limit) == (field, limit)


def test_a_condition_nests_only_so_deep() -> None:
    where: dict[str, Any] = {"a": 1}
    for _ in range(conditions.LEVELS_MAX):
        where = {"$not": where}
    assert conditions.read(where).matches({"a": 1})
    with pytest.raises(InvalidArgument) as refused:
        conditions.read({"$not": where})
    assert refused.value.limit == conditions.LEVELS_MAX


# --- the same for LanceDB ---

NAMES = ("a", "b", "0", "a.b", "a b", 'q"k', "s'k", "é", "$", "*", "back\\s", "[", "@", "")
TEXTS = (
    "", "a", "b", "5", "null", "[", "{", "\\", '"', "'", "o'b", "1e5", "\0", "a\0", "a!", 'a"',
    "2024-01-02", "é", "\u2028", "\U0001f600", "\x7f", "\t\n\x01", "'; --",
)  # fmt: skip
NUMBERS = (
    0, 1, 5, -5, 5.0, 5.5, -5.5, 0.1, -0.0, 1e16, 1e300, -1e300, 5e-324, 1e-7, 2**53, 2**53 + 1,
    -(2**53) - 1, float(2**53), 2**63, 2**64 - 1, -(2**63), 123456789.123456789, 1e15, 10**15,
)  # fmt: skip


class Words:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._one: Callable[[Any], Any] = self._random.choice

    def scalar(self) -> Any:
        return self._one([self._one(TEXTS), self._one(NUMBERS), True, False, None])

    def metadata(self, level: int = 0) -> Any:
        names = {self._one(NAMES) for _ in range(self._random.randint(0, 6))}
        return {name: self._value(level) for name in names}

    def _value(self, level: int) -> Any:
        kind = self._random.random()
        if kind < 0.6 or level > 1:
            return self.scalar()
        if kind < 0.85:
            return [self._value(level + 1) for _ in range(self._random.randint(0, 4))]
        return self.metadata(level + 1)

    def condition(self, level: int = 0) -> dict[str, Any]:
        kind = self._random.random()
        if kind < 0.15 and level < 2:
            some = [self.condition(level + 1) for _ in range(self._random.randint(1, 3))]
            return self._one([{"$or": some}, {"$and": some}, {"$not": some[0]}])
        name = ".".join(self._one(NAMES).replace(".", "\\.") for _ in range(self._one([1, 1, 2])))
        if not name or name.startswith("$"):
            name = "a"
        return {name: self._comparison()}

    def _comparison(self) -> dict[str, Any]:
        op = self._one(conditions.OPERATORS)
        if op in ("$in", "$nin"):
            return {op: [self.scalar() for _ in range(self._random.randint(1, 4))]}
        if op == "$exists":
            return {op: self._one([True, False])}
        if op in ("$eq", "$ne"):
            return {op: self.scalar()}
        return {op: self._one([self._one(TEXTS[1:]), self._one(NUMBERS)])}


@pytest.mark.parametrize("seed", range(3))
def test_lancedb_chooses_what_matches(seed: int, tmp_path: Path) -> None:
    words = Words(seed)
    held = [None if n % 20 == 0 else words.metadata() for n in range(400)]
    texts = [None if one is None else msgspec.json.encode(one).decode() for one in held]
    metadata = pa.ExtensionArray.from_storage(JSON, pa.array(texts, pa.utf8()))
    rows = pa.table({"n": pa.array(range(len(held))), "metadata": metadata})
    table = lancedb.connect(str(tmp_path)).create_table("t", rows)
    selective = 0
    for _ in range(150):
        where = words.condition()
        condition = conditions.read(where)
        wanted = [n for n, one in enumerate(held) if condition.matches(one)]
        found = table.search().where(condition.sql()).select(["n"]).limit(1000).to_arrow()
        assert sorted(found["n"].to_pylist()) == wanted, (where, condition.sql())
        selective += 0 < len(wanted) < len(held)
    assert selective > 50
