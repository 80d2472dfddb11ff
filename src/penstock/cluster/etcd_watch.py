"""A watch on etcd that goes on after the connection was lost.

A stream of changes begins right after a revision at which the range was read. When it breaks
(the member is gone, has no leader, or dropped the history that the stream needs), the range is read
again and compared with what was reported: each key that differs is reported once, as it is now,
and the next stream begins after that. So a watcher may be spared steps in between, but never the
outcome, and never hears of a change twice.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from penstock.cluster.changes import ChangeQueue
from penstock.cluster.etcd_peers import REQUIRE_LEADER, EtcdPeers, cancels_us
from penstock.cluster.store import Change
from penstock.errors import PenstockError, Unavailable

RESUME_S: Final = 0.2  # between attempts to go on
log: Final = logging.getLogger(__name__)


class EtcdWatch:
    """Feeds `queue` with the changes under its prefix, which in etcd stands behind `base`."""

    def __init__(self, peers: EtcdPeers, base: str, queue: ChangeQueue) -> None:
        self._peers = peers
        self._base = len(base.encode())
        self._prefix = (base + queue.prefix).encode()
        self._queue = queue
        self._known: dict[str, int] = {}  # key -> revision, of all that is there as reported
        self._revision = 0  # up to which everything was reported
        self._peer: Any = None
        self._stream: Any = None

    async def open(self) -> None:
        """Begin: changes from now on are reported."""
        answer = await self._read(keys_only=True)
        self._known = {self._key(kv): kv.mod_revision for kv in answer.kvs}
        self._revision = answer.header.revision
        await self._begin()

    async def run(self) -> None:
        """Report changes until cancelled, or until the watcher fell behind."""
        broken = False  # one line when it breaks and one when it goes on, however long it takes
        try:
            while not self._queue.ended:
                try:
                    if self._stream is None:
                        await self._resume()
                        log.info("a watch of the metadata goes on")
                        broken = False
                    await self._take()
                except PenstockError as error:
                    self._drop()
                    if not broken:
                        log.warning("a watch of the metadata is broken: %s", error)
                    broken = True
                    await asyncio.sleep(RESUME_S)
        except Exception as error:  # the end of a task: the watcher is told, whatever it is
            log.exception("a watch of the metadata failed")
            self._queue.end(Unavailable(f"the watch failed: {error}"))
        finally:
            self._drop()

    async def _read(self, *, keys_only: bool) -> Any:
        request = self._peers.rpc.RangeRequest(
            key=self._prefix, range_end=prefix_end(self._prefix), keys_only=keys_only
        )
        return await self._peers.call("kv", "Range", request, repeat=True)

    async def _begin(self) -> None:
        """Open a stream of all that comes after `_revision`."""
        rpc = self._peers.rpc
        create = rpc.WatchCreateRequest(
            key=self._prefix,
            range_end=prefix_end(self._prefix),
            start_revision=self._revision + 1,
        )
        self._peer = await self._peers.ready_peer()
        self._stream = self._peer.watch.Watch(metadata=REQUIRE_LEADER)
        try:
            async with asyncio.timeout(self._peers.options.request_s):
                answer = await self._receive(after=rpc.WatchRequest(create_request=create))
            if not answer.created:
                raise Unavailable("etcd answered a watch with something else")
            self._offer(answer)
        except TimeoutError as error:
            self._peers.pass_over(self._peer)
            self._drop()
            raise Unavailable(f"etcd at {self._peer.endpoint} opens no watch") from error
        except BaseException:
            self._drop()
            raise

    async def _resume(self) -> None:
        """Report how what is there differs from what was reported, then begin again."""
        answer = await self._read(keys_only=False)
        now = {self._key(kv): kv for kv in answer.kvs}
        if answer.header.revision < self._revision:
            log.error("etcd went back from revision %d: was it restored?", self._revision)
        changed = [kv for key, kv in now.items() if kv.mod_revision != self._known.get(key)]
        for kv in sorted(changed, key=lambda kv: int(kv.mod_revision)):
            self._queue.offer(Change(self._key(kv), kv.value, kv.mod_revision))
        for key in sorted(self._known.keys() - now.keys()):
            self._queue.offer(Change(key, None, answer.header.revision))
        self._known = {key: kv.mod_revision for key, kv in now.items()}
        self._revision = answer.header.revision
        await self._begin()

    async def _take(self) -> None:
        """Report what the stream brings, until the watcher has fallen behind."""
        while not self._queue.ended:
            self._offer(await self._receive())

    async def _receive(self, *, after: Any = None) -> Any:
        """The stream's next answer, after a request was sent; its end is an error."""
        try:
            if after is not None:
                await self._stream.write(after)
            answer = await self._stream.read()
        except self._peers.rpc.AioRpcError as error:
            raise self._peers.failed(self._peer, error) from error
        except asyncio.InvalidStateError as error:  # it ended while the request was being written
            raise Unavailable("etcd ended the watch") from error
        except asyncio.CancelledError as error:
            if cancels_us():
                raise
            raise Unavailable("the connection to etcd was closed") from error
        if not hasattr(answer, "events"):
            raise Unavailable("etcd ended the watch")
        if answer.canceled:
            reason = answer.cancel_reason or f"compacted at {answer.compact_revision}"
            raise Unavailable(f"etcd ended the watch: {reason}")
        return answer

    def _offer(self, answer: Any) -> None:
        for event in answer.events:
            key, revision = self._key(event.kv), event.kv.mod_revision
            if event.type:  # DELETE is 1, PUT is 0
                self._known.pop(key, None)
                self._queue.offer(Change(key, None, revision))
            else:
                self._known[key] = revision
                self._queue.offer(Change(key, event.kv.value, revision))
            self._revision = revision

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel()

    def _key(self, kv: Any) -> str:
        return str(kv.key[self._base :].decode())


def prefix_end(prefix: bytes) -> bytes:
    """The first key after all that start with `prefix`, which is not empty and ends in no 0xff."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
