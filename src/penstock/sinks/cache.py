"""The cache: every living vector in Redis, one key each, one round trip to read.

A value is a header of 24 bytes, then the vector, then the metadata (little-endian):

    0 i64 revision | 8 i64 time | 16 u32 metadata bytes | 20 u16 dimensions | 22 u8 flags
    23 u8 version, 1

Metadata is JSON text, as in the tables (`penstock.sinks.texts`).

A deleted vector leaves its header behind as a tombstone with a time to live. Redis itself compares
revisions: a script takes many keys and their values in one argument, and writes a value only over
a lower revision, so order and repetition do not matter.

**Redis Cluster.** With `cluster = true` the address is that of any of its nodes. A script may only
touch keys of one slot there, so that each call takes the keys of a slot, which are few; a trip
carries many calls. Everything else, and every key, is the same.

Beside the vectors the drivers of a pipeline keep their marks, in a hash under a key without a
colon: a server that came back empty, or with an older copy, is known by it. A script compares the
mark that the driver has read, and writes the next one only if it is still there, so that there is
no moment in which a server could be emptied unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, Final, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import redis
from numpy.typing import NDArray
from redis.crc import key_slot
from redis.exceptions import NoScriptError, RedisError

from penstock.errors import Corruption, InvalidArgument, Unavailable
from penstock.model.columns import Binary
from penstock.sinks.files import encoded_mark, mark_of
from penstock.sinks.protocol import Feed, InTasks, SinkCommit, SinkMark, Work, binary
from penstock.sinks.schema import dimensions_of, scanned_rows
from penstock.sinks.texts import map_of

HEADER: Final = np.dtype(
    [
        ("revision", "<i8"), ("time", "<i8"), ("metadata", "<u4"), ("dimensions", "<u2"),
        ("flags", "u1"), ("version", "u1"),
    ]
)  # fmt: skip
VERSION: Final = 1
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
  local held = call('GETRANGE', KEYS[i], '0', '7')
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

# ARGV: a driver's claim, its new mark, and the claim and the mark that must be there, or ''.
MARK_SCRIPT: Final = """
local call, marks = redis.call, KEYS[1]
if ARGV[3] ~= '' and call('HGET', marks, ARGV[3]) ~= ARGV[4]
  and call('HGET', marks, ARGV[1]) ~= ARGV[2] then return 0 end
for _, claim in ipairs(call('HKEYS', marks)) do
  if tonumber(claim) < tonumber(ARGV[1]) then call('HDEL', marks, claim) end
end
call('HSET', marks, ARGV[1], ARGV[2])
return 1
"""


@dataclass(frozen=True, kw_only=True)
class CachedVector:
    values: NDArray[np.float32]
    revision: int
    time: int
    metadata: dict[str, Any] | None


class CacheSink(InTasks):
    feed = Feed.STATES
    ordered = False

    def __init__(
        self,
        name: str,
        *,
        url: str,
        prefix: str = "penstock",
        pipeline: str = "",
        cluster: bool = False,
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
        self._pipeline, self._cluster = pipeline, cluster
        self._tombstone_ms = int(tombstone_hours * 3600 * 1000)
        self._timeout_s = timeout_s
        self._client: redis.Redis | redis.RedisCluster | None = None
        self._script = ""

    @property
    def client(self) -> redis.Redis | redis.RedisCluster:
        assert self._client is not None, "the sink is not open"
        return self._client

    def open(self) -> None:
        self.close()
        timeouts = {"socket_timeout": self._timeout_s, "socket_connect_timeout": self._timeout_s}
        kind: Any = redis.RedisCluster if self._cluster else redis.Redis
        with redis_errors(self.url):
            try:
                client = kind.from_url(self.url, **timeouts)
            except ValueError as error:
                raise InvalidArgument(f"url: {error}", field="url") from error
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

    def commit(self, receipts: Sequence[Any], commit: SinkCommit) -> None:
        after = commit.after
        held = ("", "") if after is None else (str(after.claim), encoded_mark(after))
        told: list[Any] = [str(commit.claim), encoded_mark(commit.mark), *held]
        with redis_errors(self.url):
            done = self.client.eval(MARK_SCRIPT, 1, self._marks_key(commit.pipeline), *told)
        if not done:
            raise Unavailable(f"the cache no longer has the mark that {self.name} had just read")

    def mark(self) -> SinkMark | None:
        key = self._marks_key(self._pipeline)
        with redis_errors(self.url):
            marks = cast(dict[bytes, bytes], self.client.hgetall(key))
        return mark_of(marks[max(marks, key=int)], where=key) if marks else None

    def _marks_key(self, pipeline: str) -> str:
        """No vector has a key without a colon."""
        return f"{self.prefix}!marks!{pipeline}"

    def get(self, vector_id: str, *, namespace: str = "default") -> CachedVector | None:
        return self.get_many([vector_id], namespace=namespace)[0]

    def get_many(
        self, vector_ids: Sequence[str], *, namespace: str = "default"
    ) -> list[CachedVector | None]:
        """The vectors in the order of their ids, None where there is none."""
        keys = [self.key(namespace, vector_id) for vector_id in vector_ids]
        with redis_errors(self.url):
            return [decode(value) for value in self._values(keys)]

    def key(self, namespace: str, vector_id: str) -> bytes:
        """A colon in the namespace is written `%3A`, so that no two vectors share a key."""
        return f"{self.prefix}:{_escaped(namespace)}:{vector_id}".encode()

    def scan(self) -> Iterator[pa.RecordBatch]:
        seen: set[bytes] = set()  # Redis may name a key twice while its table grows
        for keys in self._keys():
            fresh = [key for key in keys if key not in seen]
            seen.update(fresh)
            with redis_errors(self.url):
                values = self._values(fresh) if fresh else []
            yield from _batches(fresh, values, len(self.prefix) + 1)

    def reset(self) -> None:
        for keys in self._keys():
            with redis_errors(self.url):
                self.client.unlink(*keys)
        with redis_errors(self.url):
            self.client.unlink(self._marks_key(self._pipeline))

    def close(self) -> None:
        client, self._client = self._client, None
        if isinstance(client, redis.RedisCluster):
            client.disconnect_connection_pools()  # type: ignore[no-untyped-call]
        if client is not None:
            client.close()

    def _put(self, states: pa.Table, *, ttl_ms: int) -> None:
        keys = self._key_column(states)
        calls_max, ends = CALLS_PER_TRIP, [*range(KEYS_PER_CALL, len(keys), KEYS_PER_CALL)]
        if self._cluster:
            slots = np.array([key_slot(key) for key in keys])
            order = np.argsort(slots, kind="stable")
            states, keys = states.take(pa.array(order)), [keys[row] for row in order.tolist()]
            ends = (np.flatnonzero(np.diff(slots[order])) + 1).tolist()
            calls_max *= KEYS_PER_CALL  # each has a key or two
        values, metadata = encode(states, deleted=ttl_ms > 0)
        size, at = values.shape[1], metadata.offsets.tolist()
        flat = values.reshape(-1).data
        calls = [
            (
                last - first,
                *keys[first:last],
                flat[first * size : last * size],
                metadata.blob[at[first] : at[last]],
                ttl_ms,
            )
            for first, last in pairwise([0, *ends, len(keys)])
        ]
        for first in range(0, len(calls), calls_max):
            self._call(calls[first : first + calls_max])

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
            pipe.execute_command("EVALSHA", self._script, *call)
        pipe.execute()

    def _key_column(self, states: pa.Table) -> list[bytes]:
        namespaces = states["namespace"].combine_chunks().dictionary_encode()
        names = [f"{self.prefix}:{_escaped(name)}" for name in namespaces.dictionary.to_pylist()]
        prefixes = pa.array(names, pa.utf8()).take(namespaces.indices)
        keys = pc.binary_join_element_wise(prefixes, states["vector_id"].combine_chunks(), ":")
        return keys.cast(pa.binary()).to_pylist()  # type: ignore[no-any-return]

    def _keys(self) -> Iterator[list[bytes]]:
        """The keys of all vectors; one may come twice."""
        pattern = "".join(f"\\{c}" if c in "*?[]^\\" else c for c in self.prefix) + ":*"
        found = self.client.scan_iter(match=pattern, count=KEYS_PER_READ)
        with redis_errors(self.url):
            while keys := list(islice(found, KEYS_PER_READ)):
                yield keys

    def _values(self, keys: Sequence[bytes]) -> list[bytes | None]:
        if isinstance(self.client, redis.RedisCluster):
            return cast(list[bytes | None], self.client.mget_nonatomic(keys))
        return cast(list[bytes | None], self.client.mget(keys))


def encode(states: pa.Table, *, deleted: bool) -> tuple[NDArray[np.uint8], Binary]:
    """Values as rows of bytes without their metadata, and that."""
    count = len(states)
    dimensions = 0 if deleted else dimensions_of(states)
    held = pa.nulls(count, pa.utf8()) if deleted else states["metadata"].combine_chunks()
    metadata = binary(held.cast(pa.binary()))
    sizes = np.diff(metadata.offsets)
    rows = np.zeros((count, HEADER.itemsize + 4 * dimensions), np.uint8)
    header = rows[:, : HEADER.itemsize].view(HEADER).reshape(count)
    header["revision"] = states["revision"].to_numpy()
    header["time"] = states["time"].to_numpy()
    header["metadata"] = sizes
    header["dimensions"] = dimensions
    header["flags"] = DELETED if deleted else HAS_METADATA * (sizes > 0)
    header["version"] = VERSION
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
    if header["version"] != VERSION:
        raise Corruption(f"a cached vector is of version {header['version']}, not {VERSION}")
    if header["flags"] & DELETED:
        return None
    end = HEADER.itemsize + 4 * int(header["dimensions"])
    if len(value) != end + int(header["metadata"]):
        raise Corruption(f"a cached vector has {len(value)} bytes, not what its header says")
    text = value[end:]
    return CachedVector(
        values=np.frombuffer(value, np.float32, int(header["dimensions"]), HEADER.itemsize),
        revision=int(header["revision"]),
        time=int(header["time"]),
        metadata=map_of(text or None),
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
    found: dict[int, list[tuple[str, str, NDArray[np.float32], str | None, int]]] = {}
    for key, value in zip(keys, values, strict=True):
        vector = decode(value)
        if vector is None or value is None:
            continue
        namespace, vector_id = key[skip:].decode().split(":", 1)
        text = value[HEADER.itemsize + vector.values.nbytes :].decode() or None
        row = (_unescaped(namespace), vector_id, vector.values, text, vector.revision)
        found.setdefault(len(vector.values), []).append(row)
    yield from map(scanned_rows, found.values())


def _escaped(namespace: str) -> str:
    return namespace.replace("%", "%25").replace(":", "%3A")


def _unescaped(namespace: str) -> str:
    return namespace.replace("%3A", ":").replace("%25", "%")
