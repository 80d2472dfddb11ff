"""The cache: every living vector in Redis, one key each, one round trip to read.

A value is a header of 24 bytes, then the vector, then the metadata (little-endian):

    0 i64 revision | 8 i64 time | 16 u32 metadata bytes | 20 u16 dimensions | 22 u8 flags | 23 u8 0

A deleted vector leaves its header behind as a tombstone with a time to live. Redis itself compares
revisions: a script takes many keys and their values in one argument, and writes a value only over
a lower revision, so order and repetition do not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, cast

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import redis
from numpy.typing import NDArray
from redis.exceptions import NoScriptError, RedisError

from penstock.errors import Corruption, InvalidArgument, Unavailable
from penstock.model.columns import Binary
from penstock.sinks.protocol import Feed, Work, binary
from penstock.sinks.schema import dimensions_of, scanned_rows

HEADER: Final = np.dtype(
    [
        ("revision", "<i8"), ("time", "<i8"), ("metadata", "<u4"), ("dimensions", "<u2"),
        ("flags", "u1"), ("zero", "u1"),
    ]
)  # fmt: skip
DELETED, HAS_METADATA = 1, 2
KEYS_PER_CALL: Final = 500  # the server does nothing else meanwhile: about a millisecond
CALLS_PER_TRIP: Final = 20
KEYS_PER_READ: Final = 1000

# ARGV: the values, all of one length; the metadata one behind the other; time to live in ms or 0.
SCRIPT: Final = """
local call, unpack, sub = redis.call, struct.unpack, string.sub
local values, metadata, ttl = ARGV[1], ARGV[2], tonumber(ARGV[3])
local size = #values / #KEYS
local at, meta = 1, 1
local written = 0
for i = 1, #KEYS do
  local revision, _, extra = unpack('<llI4', values, at)
  local held = call('GETRANGE', KEYS[i], 0, 7)
  if #held < 8 or unpack('<l', held) < revision then
    local value = sub(values, at, at + size - 1)
    if extra > 0 then value = value .. sub(metadata, meta, meta + extra - 1) end
    if ttl > 0 then call('SET', KEYS[i], value, 'PX', ttl)
    else call('SET', KEYS[i], value) end
    written = written + 1
  end
  at = at + size
  meta = meta + extra
end
return written
"""


@dataclass(frozen=True, kw_only=True)
class CachedVector:
    values: NDArray[np.float32]
    revision: int
    time: int
    metadata: dict[str, Any] | None


class CacheSink:
    feed = Feed.STATES
    ordered = False

    def __init__(
        self,
        name: str,
        *,
        url: str,
        prefix: str = "penstock",
        pipeline: str = "",
        tombstone_hours: float = 24.0,
        timeout_s: float = 10.0,
    ) -> None:
        if not prefix or ":" in prefix:
            raise InvalidArgument("a prefix is a text without a colon", field="prefix")
        if not tombstone_hours > 0:
            raise InvalidArgument(
                "tombstone_hours must be above 0", field="tombstone_hours", limit=0
            )
        self.name, self.url, self.prefix = name, url, prefix
        self._tombstone_ms = int(tombstone_hours * 3600 * 1000)
        self._timeout_s = timeout_s
        self._client: redis.Redis | None = None
        self._script = ""

    @property
    def client(self) -> redis.Redis:
        assert self._client is not None, "the sink is not open"
        return self._client

    def open(self) -> None:
        self.close()
        try:
            client = redis.Redis.from_url(
                self.url, socket_timeout=self._timeout_s, socket_connect_timeout=self._timeout_s
            )
        except ValueError as error:
            raise InvalidArgument(f"url: {error}", field="url") from error
        with redis_errors(self.url):
            self._script = client.script_load(SCRIPT)
        self._client = client

    def write(self, work: Work) -> None:
        states = work.states
        if states is None or not len(states):
            return
        deleted = states["deleted"].to_numpy()
        if deleted.any():
            gone = states.filter(pa.array(deleted))
            self._put(gone, ttl_ms=self._tombstone_ms)
            states = states.filter(pa.array(~deleted))
        if len(states):
            self._put(states, ttl_ms=0)

    def cursor(self) -> int | None:
        return None

    def get(self, vector_id: str, *, namespace: str = "default") -> CachedVector | None:
        return self.get_many([vector_id], namespace=namespace)[0]

    def get_many(
        self, vector_ids: Sequence[str], *, namespace: str = "default"
    ) -> list[CachedVector | None]:
        """The vectors in the order of their ids, None where there is none."""
        keys = [self.key(namespace, vector_id) for vector_id in vector_ids]
        with redis_errors(self.url):
            found = cast(list[bytes | None], self.client.mget(keys))
        return [decode(value) for value in found]

    def key(self, namespace: str, vector_id: str) -> bytes:
        """A colon in the namespace is written `%3A`, so that no two vectors share a key."""
        return f"{self.prefix}:{_escaped(namespace)}:{vector_id}".encode()

    def scan(self) -> Iterator[pa.RecordBatch]:
        seen: set[bytes] = set()  # Redis may name a key twice while its table grows
        for keys in self._keys():
            fresh = [key for key in keys if key not in seen]
            seen.update(fresh)
            with redis_errors(self.url):
                values = cast(list[bytes | None], self.client.mget(fresh) if fresh else [])
            yield from _batches(fresh, values, len(self.prefix) + 1)

    def reset(self) -> None:
        for keys in self._keys():
            with redis_errors(self.url):
                self.client.unlink(*keys)

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _put(self, states: pa.Table, *, ttl_ms: int) -> None:
        keys = self._key_column(states)
        values, metadata = encode(states, deleted=ttl_ms > 0)
        size = values.shape[1]
        flat, ends = values.reshape(-1).data, metadata.offsets.tolist()
        calls = []
        for first in range(0, len(keys), KEYS_PER_CALL):
            last = min(first + KEYS_PER_CALL, len(keys))
            some = keys[first:last]
            rows = flat[first * size : last * size]
            extra = metadata.blob[ends[first] : ends[last]]
            calls.append((len(some), *some, rows, extra, ttl_ms))
        for first in range(0, len(calls), CALLS_PER_TRIP):
            self._call(calls[first : first + CALLS_PER_TRIP])

    def _call(self, calls: list[tuple[Any, ...]]) -> None:
        with redis_errors(self.url):
            try:
                self._send(calls)
            except NoScriptError:  # the server was started anew
                self._script = self.client.script_load(SCRIPT)
                self._send(calls)

    def _send(self, calls: list[tuple[Any, ...]]) -> None:
        pipe = self.client.pipeline(transaction=False)
        for call in calls:
            pipe.evalsha(self._script, *call)
        pipe.execute()

    def _key_column(self, states: pa.Table) -> list[bytes]:
        namespaces = states["namespace"].combine_chunks().dictionary_encode()
        names = [f"{self.prefix}:{_escaped(name)}" for name in namespaces.dictionary.to_pylist()]
        prefixes = pa.array(names, pa.utf8()).take(namespaces.indices)
        keys = pc.binary_join_element_wise(prefixes, states["vector_id"].combine_chunks(), ":")
        return keys.cast(pa.binary()).to_pylist()  # type: ignore[no-any-return]

    def _keys(self) -> Iterator[list[bytes]]:
        pattern = "".join(f"\\{c}" if c in "*?[]^\\" else c for c in self.prefix) + ":*"
        at: Any = 0
        while True:
            with redis_errors(self.url):
                at, keys = self.client.scan(at, match=pattern, count=KEYS_PER_READ)
            if keys:
                yield cast(list[bytes], keys)
            if not at:
                return


def encode(states: pa.Table, *, deleted: bool) -> tuple[NDArray[np.uint8], Binary]:
    """Values as rows of bytes without their metadata, and that."""
    count = len(states)
    dimensions = 0 if deleted else dimensions_of(states)
    held = pa.nulls(count, pa.binary()) if deleted else states["metadata"].combine_chunks()
    metadata = binary(held)
    sizes = np.diff(metadata.offsets)
    rows = np.zeros((count, HEADER.itemsize + 4 * dimensions), np.uint8)
    header = rows[:, : HEADER.itemsize].view(HEADER).reshape(count)
    header["revision"] = states["revision"].to_numpy()
    header["time"] = states["time"].to_numpy()
    header["metadata"] = sizes
    header["dimensions"] = dimensions
    header["flags"] = DELETED if deleted else HAS_METADATA * (sizes > 0)
    if not deleted:
        flat = states["vector"].combine_chunks().flatten().to_numpy()
        rows[:, HEADER.itemsize :] = flat.reshape(count, -1).view(np.uint8)
    return rows, metadata


def decode(value: bytes | None) -> CachedVector | None:
    """What a key holds; a tombstone is nothing."""
    if value is None:
        return None
    if len(value) < HEADER.itemsize:
        raise Corruption(f"a cached vector has {len(value)} bytes, less than its header")
    header = np.frombuffer(value, HEADER, 1)[0]
    if header["flags"] & DELETED:
        return None
    end = HEADER.itemsize + 4 * int(header["dimensions"])
    if len(value) != end + int(header["metadata"]):
        raise Corruption(f"a cached vector has {len(value)} bytes, not what its header says")
    packed = value[end:]
    return CachedVector(
        values=np.frombuffer(value, np.float32, int(header["dimensions"]), HEADER.itemsize),
        revision=int(header["revision"]),
        time=int(header["time"]),
        metadata=msgspec.msgpack.decode(packed, type=dict[str, Any]) if packed else None,
    )


@contextmanager
def redis_errors(url: str) -> Iterator[None]:
    try:
        yield
    except RedisError as error:
        where = url.rsplit("@", 1)[-1]  # without a password
        raise Unavailable(f"the cache at {where} cannot be used: {error}") from error


def _batches(
    keys: list[bytes], values: Sequence[bytes | None], skip: int
) -> Iterator[pa.RecordBatch]:
    found: dict[int, list[tuple[str, str, NDArray[np.float32], bytes | None, int]]] = {}
    for key, value in zip(keys, values, strict=True):
        vector = decode(value)
        if vector is None or value is None:
            continue
        namespace, vector_id = key[skip:].decode().split(":", 1)
        packed = value[HEADER.itemsize + vector.values.nbytes :] or None
        row = (_unescaped(namespace), vector_id, vector.values, packed, vector.revision)
        found.setdefault(len(vector.values), []).append(row)
    yield from map(scanned_rows, found.values())


def _escaped(namespace: str) -> str:
    return namespace.replace("%", "%25").replace(":", "%3A")


def _unescaped(namespace: str) -> str:
    return namespace.replace("%3A", ":").replace("%25", "%")
