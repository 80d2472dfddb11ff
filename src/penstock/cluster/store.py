"""The metadata store: a small map with revisions, shared by every node of a cluster.

Keys are text with `/` between their parts, values are bytes. Each change gets the next *revision*
of the whole store, and an entry remembers the revision that wrote it last. That is all it takes
for safety: whoever changes an entry names the revision it has read, and loses if another was
faster (compare and swap). Epochs, topic ids and topic configurations all rest on it.

What every implementation promises, and `tests/conformance` asks of each:
- a change is durable before its call returns, and before anyone can read or watch it;
- revisions increase, and a call that is refused changes nothing;
- a watch reports every change after it was entered, once, in the order of revisions. Where the
  store is another process and was out of reach, it reports how each key differs from before.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import ClassVar, Final, NamedTuple, NoReturn, Protocol, TypeVar

from penstock.errors import Fatal, InvalidArgument, PenstockError, RevisionConflict, Unavailable

KEY_BYTES_MAX: Final = 1024
VALUE_BYTES_MAX: Final = 1 << 20
WATCH_CHANGES_MAX: Final = 10_000  # a watch ends when more wait to be taken
SWAPS_MAX: Final = 100  # lost races before the caller is told to come back
T = TypeVar("T")
TELL_S: Final = 60.0  # the least time between two lines about the same trouble
log: Final = logging.getLogger(__name__)


class Versioned(NamedTuple):
    """One entry. `revision` is of its last change, `revision_created` of its first."""

    key: str
    value: bytes
    revision: int
    revision_created: int


class MetadataChange(NamedTuple):
    """What a watch reports: `value` None means that the key was deleted."""

    key: str
    value: bytes | None
    revision: int


class MetadataStore(Protocol):
    async def get(self, key: str) -> Versioned | None: ...

    async def range(self, prefix: str) -> list[Versioned]:
        """All entries whose key starts with `prefix`, by key, as of one moment."""

    async def put(self, key: str, value: bytes, *, expected_revision: int | None = None) -> int:
        """Write, and return the change's revision.

        `expected_revision` is the entry's revision as the caller read it, 0 if there must be none,
        None to write whatever is there. Raises `RevisionConflict` if it is another.
        """

    async def delete(self, key: str, *, expected_revision: int | None = None) -> bool:
        """Remove; False if there was nothing. Raises `RevisionConflict` as `put` does."""

    def watch(self, prefix: str) -> AbstractAsyncContextManager[AsyncIterator[MetadataChange]]:
        """Changes from the moment the context is entered: enter first, then read the range. A
        watcher that falls `WATCH_CHANGES_MAX` behind gets `Unavailable`; it starts over."""

    async def close(self) -> None: ...


class LeasingStore(MetadataStore, Protocol):
    """A store whose entries can live as long as somebody says so."""

    async def put(
        self, key: str, value: bytes, *, expected_revision: int | None = None, lease: int = 0
    ) -> int: ...

    async def grant(self, ttl_s: int) -> int:
        """A new lease. It ends after `ttl_s` in which nobody called `keep_alive`."""

    async def keep_alive(self, lease: int) -> bool:
        """Start the lease's time anew; False if it has ended, and its entries with it."""

    async def revoke(self, lease: int) -> None:
        """End the lease now, and its entries with it; one that has ended is no error."""


def check_entry(key: str, value: bytes = b"") -> None:
    """Refuse a key or value that not every store could hold."""
    if not key or len(key.encode()) > KEY_BYTES_MAX:
        raise InvalidArgument(
            f"a metadata key has 1 to {KEY_BYTES_MAX} bytes", field="key", limit=KEY_BYTES_MAX
        )
    if len(value) > VALUE_BYTES_MAX:
        raise InvalidArgument(
            f"a metadata value of {len(value)} bytes is over {VALUE_BYTES_MAX}",
            field="value",
            limit=VALUE_BYTES_MAX,
        )


async def until_won(swap: Callable[[], Awaitable[T]]) -> T:
    """Repeat a read-and-swap that others may win. Each round somebody wins, so work is done."""
    for _ in range(SWAPS_MAX):
        try:
            return await swap()
        except RevisionConflict:
            continue
    raise Unavailable(f"a metadata entry was changed by others {SWAPS_MAX} times in a row")


class ChangeQueue:
    """The changes under a prefix that one watcher has not taken yet."""

    limit: ClassVar[int] = WATCH_CHANGES_MAX

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.ended: PenstockError | None = None
        self._changes: deque[MetadataChange] = deque()
        self._news = asyncio.Event()

    def offer(self, change: MetadataChange) -> None:
        if self.ended or not change.key.startswith(self.prefix):
            return
        if len(self._changes) >= self.limit:
            self._changes.clear()
            self.end(Unavailable("the watch fell behind; read the range again"))
            return
        self._changes.append(change)
        self._news.set()

    def end(self, reason: PenstockError) -> None:
        """Raise `reason` to the watcher once it has taken what is left."""
        self.ended = self.ended or reason
        self._news.set()

    def __aiter__(self) -> AsyncIterator[MetadataChange]:
        return self

    async def __anext__(self) -> MetadataChange:
        while not self._changes:
            if self.ended:
                raise self.ended
            self._news.clear()
            await self._news.wait()
        return self._changes.popleft()


@asynccontextmanager
async def follow(
    store: MetadataStore, prefix: str, *, known: Iterable[str] = ()
) -> AsyncIterator[AsyncIterator[MetadataChange]]:
    """What is there, entry by entry, then every change of it, with no gap between the two.

    Keys that the caller knows of and that are gone are reported first. The range is read after the
    watch was entered, so a change may be in both; the one that is older than what was read is left
    out.
    """
    async with store.watch(prefix) as changes:
        entries = await store.range(prefix)
        revisions = {entry.key: entry.revision for entry in entries}
        gone = [key for key in known if key not in revisions]

        async def told() -> AsyncGenerator[MetadataChange, None]:
            for key in gone:
                yield MetadataChange(key, None, 0)
            for entry in entries:
                yield MetadataChange(entry.key, entry.value, entry.revision)
            async for change in changes:
                if change.revision > revisions.get(change.key, 0):
                    yield change

        async with aclosing(told()) as story:
            yield story


async def repeat(work: Callable[[], Awaitable[None]], *, trouble: str, pause_s: float) -> NoReturn:
    """Do `work` until cancelled, whatever the metadata store answers. A running node needs the
    store for changes alone, so one that is away, refuses us or holds what nobody can read takes
    nothing from it. To end the node instead would end all of them, for they share the store.
    Beginning anew is safe because such work starts by reading what it needs. Only what a node's own
    disk does to it (`Fatal`) is let through.

    `work` waits for its own next turn. A line that begins with `trouble` tells of the first failure
    and then now and then.
    """
    loop = asyncio.get_running_loop()
    told: type[Exception] | None = None
    told_at = 0.0
    while True:
        try:
            await work()
            told = None
        except Fatal:
            raise
        except Exception as error:  # noqa: BLE001 - it is logged, and the work must not end
            if type(error) is not told or loop.time() - told_at >= TELL_S:
                told, told_at = type(error), loop.time()
                _tell(trouble, error)
            await asyncio.sleep(pause_s)


def _tell(trouble: str, error: Exception) -> None:
    if isinstance(error, PenstockError):
        log.warning("%s: %s", trouble, error)
    else:
        log.error("%s", trouble, exc_info=error)
