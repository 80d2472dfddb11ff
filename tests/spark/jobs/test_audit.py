"""The audit: everything equal at rest, lag told apart from damage, every damage found."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import redis
from deltalake import DeltaTable, write_deltalake
from tests.spark.jobs.support import Ground, mixed

from penstock.sinks.cache import HEADER
from penstock.sinks.index import Index


def test_at_rest_everything_is_equal(ground: Ground) -> None:
    found = ground.audit()
    assert found["ok"], found
    assert {name: sink["verdict"] for name, sink in found["sinks"].items()} == dict.fromkeys(
        ("lake", "index", "cache", "remote", "notify"), "equal"
    )
    facts = mixed().facts
    assert sum(partition["messages"] for partition in found["partitions"]) == facts["rows"]
    assert found["sinks"]["lake"]["history"]["compared"] == facts["deltas"]
    assert found["sinks"]["notify"]["messages"]["compared"] == facts["deltas"]
    assert not list((ground.folder / "state").glob(".job-*"))


class Store(Protocol):
    """A store with vectors that can be changed behind its sink's back."""

    def vector(self) -> tuple[str, str]: ...
    def flip(self) -> None: ...
    def drop(self) -> None: ...
    def add(self) -> None: ...


class Lake:
    """Row changes of the newest revision of one vector."""

    def __init__(self, path: Path) -> None:
        self._path = str(path / "vectors")
        self._rows = DeltaTable(self._path).to_pyarrow_table()
        alive = self._rows.filter(pc.invert(self._rows["deleted"]))
        alive = alive.filter(alive["metadata"].is_valid())
        self._newest = alive.sort_by([("revision", "descending")]).slice(0, 1)

    def vector(self) -> tuple[str, str]:
        row = self._newest.to_pylist()[0]
        return row["namespace"], row["vector_id"]

    def _write(self, *tables: pa.Table) -> None:
        write_deltalake(self._path, pa.concat_tables(tables), mode="overwrite")

    def _others(self, *, revision: bool) -> pa.Table:
        mine = pc.equal(self._rows["vector_id"], self.vector()[1])
        if revision:
            mine = pc.and_(mine, pc.equal(self._rows["revision"], self._newest["revision"][0]))
        return self._rows.filter(pc.invert(mine))

    def flip(self) -> None:
        values = self._newest["vector"].to_pylist()[0]
        changed = pa.array([[values[0] + 1, *values[1:]]], pa.list_(pa.float32()))
        at = self._newest.schema.get_field_index("vector")
        row = self._newest.set_column(at, self._newest.schema.field(at), changed)
        self._write(self._others(revision=True), row)

    def drop(self) -> None:
        self._write(self._others(revision=False))

    def age(self) -> None:
        at = self._newest.schema.get_field_index("revision")
        older = pc.subtract(self._newest["revision"], 1)
        row = self._newest.set_column(at, self._newest.schema.field(at), older)
        self._write(self._others(revision=False), row)

    def strip(self) -> None:
        at = self._newest.schema.get_field_index("metadata")
        field = self._newest.schema.field(at)
        self._write(
            self._others(revision=True),
            self._newest.set_column(at, field, pa.nulls(1, field.type)),
        )

    def add(self) -> None:
        at = self._newest.schema.get_field_index("vector_id")
        field = self._newest.schema.field(at)
        self._write(self._rows, self._newest.set_column(at, field, pa.array(["stray"])))


class Lance:
    def __init__(self, path: Path) -> None:
        self._index = Index(str(path))
        rows = (row for batch in self._index.scan() for row in batch.to_pylist())
        self._row = next(row for row in rows if row["metadata"] and row["revision"] > 1)
        self._table = self._index.database.open_table("vectors_16")
        self._where = f"vector_id = '{self._row['vector_id']}'"

    def vector(self) -> tuple[str, str]:
        return self._row["namespace"], self._row["vector_id"]

    def flip(self) -> None:
        values = list(self._row["vector"])
        self._table.update(where=self._where, values={"vector": [values[0] + 1, *values[1:]]})

    def drop(self) -> None:
        self._table.delete(self._where)

    def age(self) -> None:
        self._table.update(where=self._where, values={"revision": self._row["revision"] - 1})

    def strip(self) -> None:
        row = self._table.search().where(self._where).to_arrow()
        at = row.schema.get_field_index("metadata")
        field = row.schema.field(at)
        self.drop()
        self._table.add(row.set_column(at, field, pa.nulls(1, field.type)))

    def double(self) -> None:
        self._table.add(self._table.search().where(self._where).to_arrow())

    def add(self) -> None:
        row = self._table.search().where(self._where).to_arrow()
        at = row.schema.get_field_index("vector_id")
        stray = row.set_column(at, row.schema.field(at), pa.array(["stray"]))
        at = row.schema.get_field_index("key")
        self._table.add(stray.set_column(at, row.schema.field(at), pa.array(["docs\0stray"])))


class Cache:
    def __init__(self, url: str) -> None:
        self._redis = redis.Redis.from_url(url)
        keys = self._redis.scan_iter(match="penstock:*")
        self._keys = sorted(key for key in keys if self._redis.ttl(key) < 0)
        self._key, self._value = self._keys[0], self._redis.get(self._keys[0])

    def vector(self) -> tuple[str, str]:
        _, namespace, vector_id = self._key.decode().split(":")
        return namespace, vector_id

    def flip(self) -> None:
        changed = bytearray(self._value)
        changed[HEADER.itemsize] ^= 1
        self._redis.set(self._key, bytes(changed))

    def drop(self) -> None:
        self._redis.delete(self._key)

    def add(self) -> None:
        self._redis.set(self._key.replace(self.vector()[1].encode(), b"stray"), self._value)


@pytest.fixture
def stores(ground: Ground, tmp_path: Path) -> Iterator[tuple[Ground, dict[str, Store]]]:
    """The pipeline on copies of its stores."""
    changed = []
    for sink in ground.settings.sinks:
        if path := sink.options.get("path"):
            shutil.copytree(path, tmp_path / sink.name)
            options = sink.options | {"path": str(tmp_path / sink.name)}
            changed.append(msgspec.structs.replace(sink, options=options))
        elif sink.kind == "cache":
            changed.append(sink)
    server = redis.Redis.from_url(changed[2].options["url"])
    before = {key: (server.dump(key), server.pttl(key)) for key in server.scan_iter()}
    settings = msgspec.structs.replace(ground.settings, sinks=tuple(changed))
    yield (
        replace(ground, settings=settings),
        {"lake": Lake(tmp_path / "lake"), "index": Lance(tmp_path / "index"),
         "cache": Cache(changed[2].options["url"])},
    )  # fmt: skip
    server.flushall()
    for key, (value, left_ms) in before.items():
        server.restore(key, max(0, left_ms), value)


@pytest.mark.parametrize(
    ("damage", "kind"), [("flip", "values"), ("drop", "missing"), ("add", "extra")]
)
def test_damage_is_found_in_every_store(
    stores: tuple[Ground, dict[str, Store]], damage: str, kind: str
) -> None:
    ground, damaged = stores
    for store in damaged.values():
        getattr(store, damage)()
    found = ground.audit()
    assert not found["ok"]
    for name, store in damaged.items():
        sink = found["sinks"][name]
        assert (sink["verdict"], sink["vectors"]["differences"]) == ("different", {kind: 1}), name
        (place,) = sink["vectors"]["first_differences"]
        wanted = "stray" if damage == "add" else store.vector()[1]
        assert (place["kind"], place["vector_id"]) == (kind, wanted)
        if damage == "flip":  # a second look says where
            assert place["component"] == 0
            assert place["components"] == 1
            assert place["value"] != place["expected"]


@pytest.mark.parametrize(
    ("damage", "kind", "names"),
    [
        ("age", "revision", ("lake", "index")),
        ("strip", "metadata", ("lake", "index")),
        ("double", "twice", ("index",)),
    ],
)
def test_other_damage_is_found_where_it_can_be(
    stores: tuple[Ground, dict[str, Store]], damage: str, kind: str, names: tuple[str, ...]
) -> None:
    ground, damaged = stores
    for name in names:
        getattr(damaged[name], damage)()
    found = ground.audit()["sinks"]
    for name, sink in found.items():
        told = {kind: 1} if name in names else None
        assert sink["vectors"].get("differences") == told, name
    for name in names:
        (place,) = found[name]["vectors"]["first_differences"]
        assert place["vector_id"] == damaged[name].vector()[1]


def test_a_history_with_a_row_twice_and_one_lost_is_found(
    stores: tuple[Ground, dict[str, Store]],
) -> None:
    ground, _ = stores
    path = ground.settings.sinks[0].options["path"] + "/history"
    rows = DeltaTable(path).to_pyarrow_table()
    write_deltalake(path, pa.concat_tables([rows.slice(1), rows.slice(5, 1)]), mode="overwrite")
    found = ground.audit()
    history = found["sinks"]["lake"]["history"]
    assert not found["ok"]
    assert history["differences"] == {"missing": 1, "twice": 1}
    shown = {one["kind"]: one["ordinal"] for one in history["first_differences"]}
    ordinals = rows["ordinal"].to_pylist()
    assert shown == {"missing": ordinals[0], "twice": ordinals[5]}
    assert found["sinks"]["index"]["verdict"] == "equal"


def test_a_store_that_is_away_is_not_called_wrong(
    stores: tuple[Ground, dict[str, Store]],
) -> None:
    ground, _ = stores
    sinks = list(ground.settings.sinks)
    sinks[2] = msgspec.structs.replace(sinks[2], options={"url": "redis://127.0.0.1:1/0"})
    away = replace(ground, settings=msgspec.structs.replace(ground.settings, sinks=tuple(sinks)))
    found = away.audit()
    assert not found["ok"]
    assert found["sinks"]["cache"]["verdict"] == "unavailable"
    assert found["sinks"]["lake"]["verdict"] == "equal"
