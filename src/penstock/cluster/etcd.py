"""The metadata store of a cluster: a part of etcd's keys, under one prefix.

etcd gives what a metadata store promises: a revision per change, compare and swap as a transaction,
ordered watches, durability on a majority. This module adds bounds: a call ends with `Unavailable`
after `connect_s + request_s` at the latest (a read after twice that, where there is a second
member), and a watch goes on by itself once etcd is back.

Besides, etcd has leases: keys put under one vanish when nobody has kept it alive for its time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from penstock.cluster.changes import ChangeQueue
from penstock.cluster.etcd_peers import REQUIRE_LEADER, EtcdOptions, EtcdPeers, cancels_us
from penstock.cluster.etcd_watch import EtcdWatch, prefix_end
from penstock.cluster.store import Change, Versioned, check_entry
from penstock.errors import InvalidArgument, NotFound, RevisionConflict, Unavailable
from penstock.model.topic import NAME

PREFIX_VERSION: Final = "v1"  # of the keys and values; another version would live beside this one
DEFAULT_OPTIONS: Final = EtcdOptions()


def cluster_prefix(cluster: str) -> str:
    """Where the keys of a cluster of this name are."""
    if not NAME.fullmatch(cluster):
        raise InvalidArgument(f"a cluster's name is like {NAME.pattern}", field="cluster")
    return f"/penstock/{PREFIX_VERSION}/{cluster}/"


class EtcdStore:
    """Use it from one event loop. Nothing is sent before the first call."""

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        prefix: str,
        options: EtcdOptions = DEFAULT_OPTIONS,
    ) -> None:
        if not prefix.startswith("/") or not prefix.endswith("/"):
            raise InvalidArgument("a prefix starts and ends with /", field="prefix")
        self.prefix = prefix
        self.options = options
        self._peers = EtcdPeers(endpoints, options)
        self._rpc = self._peers.rpc
        self._watches: set[ChangeQueue] = set()

    async def get(self, key: str) -> Versioned | None:
        request = self._rpc.RangeRequest(key=self._full(key))
        answer = await self._peers.call("kv", "Range", request, repeat=True)
        return self._entry(answer.kvs[0]) if answer.kvs else None

    async def range(self, prefix: str) -> list[Versioned]:
        full = self._full(prefix)
        request = self._rpc.RangeRequest(key=full, range_end=prefix_end(full))
        answer = await self._peers.call("kv", "Range", request, repeat=True)
        return [self._entry(kv) for kv in answer.kvs]

    async def put(
        self,
        key: str,
        value: bytes,
        *,
        expected_revision: int | None = None,
        lease: int = 0,
    ) -> int:
        """As every store; `lease` is one that `grant` gave: the key vanishes with it."""
        check_entry(key, value)
        request = self._rpc.PutRequest(key=self._full(key), value=value, lease=lease)
        if expected_revision is None:
            answer = await self._peers.call("kv", "Put", request)
        else:
            change = self._rpc.RequestOp(request_put=request)
            answer = await self._swap(key, expected_revision, change)
        return int(answer.header.revision)

    async def delete(self, key: str, *, expected_revision: int | None = None) -> bool:
        request = self._rpc.DeleteRangeRequest(key=self._full(key))
        if expected_revision is None:
            answer = await self._peers.call("kv", "DeleteRange", request)
            return bool(answer.deleted)
        change = self._rpc.RequestOp(request_delete_range=request)
        answer = await self._swap(key, expected_revision, change)
        return bool(answer.responses[0].response_delete_range.deleted)

    @asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[AsyncIterator[Change]]:
        queue = ChangeQueue(prefix)
        watch = EtcdWatch(self._peers, self.prefix, queue)
        await watch.open()
        self._watches.add(queue)
        pump = asyncio.create_task(watch.run(), name=f"metadata-watch-{prefix}")
        try:
            yield queue
        finally:
            self._watches.discard(queue)
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)

    async def grant(self, ttl_s: int) -> int:
        request = self._rpc.LeaseGrantRequest(TTL=ttl_s)
        answer = await self._peers.call("lease", "LeaseGrant", request)
        return int(answer.ID)

    async def keep_alive(self, lease: int) -> bool:
        peer = await self._peers.ready_peer()
        request = self._rpc.LeaseKeepAliveRequest(ID=lease)
        stream = peer.lease.LeaseKeepAlive(
            iter((request,)), timeout=self.options.request_s, metadata=REQUIRE_LEADER
        )
        try:
            answer = await stream.read()
        except self._rpc.AioRpcError as error:
            raise self._peers.failed(peer, error) from error
        except asyncio.CancelledError as error:
            if cancels_us():
                raise
            raise Unavailable("the connection to etcd was closed") from error
        finally:
            stream.cancel()
        if not hasattr(answer, "TTL"):
            raise Unavailable(f"etcd at {peer.endpoint} ended a keep-alive without an answer")
        return bool(answer.TTL > 0)

    async def revoke(self, lease: int) -> None:
        try:
            await self._peers.call("lease", "LeaseRevoke", self._rpc.LeaseRevokeRequest(ID=lease))
        except NotFound:
            return

    async def close(self) -> None:
        """Later calls and open watches get `Unavailable`."""
        for queue in self._watches:
            queue.end(Unavailable("the metadata store is closed"))
        await self._peers.close()

    async def _swap(self, key: str, expected: int, change: Any) -> Any:
        """Make the change if the entry has the expected revision; etcd says 0 of one that is not
        there, as we do."""
        rpc, full = self._rpc, self._full(key)
        held = rpc.Compare(
            key=full,
            target=rpc.Compare.MOD,
            result=rpc.Compare.EQUAL,
            mod_revision=expected,
        )
        look = rpc.RequestOp(request_range=rpc.RangeRequest(key=full, keys_only=True))
        request = rpc.TxnRequest(compare=[held], success=[change], failure=[look])
        answer = await self._peers.call("kv", "Txn", request)
        if not answer.succeeded:
            kvs = answer.responses[0].response_range.kvs
            revision = int(kvs[0].mod_revision) if kvs else 0
            raise RevisionConflict(
                f"{key} is at revision {revision}, not {expected}", key=key, revision=revision
            )
        return answer

    def _full(self, key: str) -> bytes:
        return (self.prefix + key).encode()

    def _entry(self, kv: Any) -> Versioned:
        key = kv.key[len(self.prefix.encode()) :].decode()
        return Versioned(key, kv.value, kv.mod_revision, kv.create_revision)
