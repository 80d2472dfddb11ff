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

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Final, NamedTuple, Protocol, TypeVar

from penstock.errors import InvalidArgument, RevisionConflict, Unavailable

KEY_BYTES_MAX: Final = 1024
VALUE_BYTES_MAX: Final = 1 << 20
WATCH_CHANGES_MAX: Final = 10_000  # not yet taken by the watcher; past it the watch ends
SWAPS_MAX: Final = 100  # lost races before the caller is told to come back

T = TypeVar("T")


class Versioned(NamedTuple):
    """One entry. `revision` is of its last change, `revision_created` of its first."""

    key: str
    value: bytes
    revision: int
    revision_created: int


class Change(NamedTuple):
    """What a watch reports: `value` None means that the key was deleted."""

    key: str
    value: bytes | None
    revision: int


class MetadataStore(Protocol):
    async def get(self, key: str) -> Versioned | None: ...

    async def range(self, prefix: str) -> list[Versioned]:
        """All entries whose key starts with `prefix`, by key, as of one moment."""
        ...

    async def put(self, key: str, value: bytes, *, expected_revision: int | None = None) -> int:
        """Write, and return the change's revision.

        `expected_revision` is the entry's revision as the caller read it, 0 if there must be none,
        None to write whatever is there. Raises `RevisionConflict` if it is another.
        """
        ...

    async def delete(self, key: str, *, expected_revision: int | None = None) -> bool:
        """Remove; False if there was nothing. Raises `RevisionConflict` as `put` does."""
        ...

    def watch(self, prefix: str) -> AbstractAsyncContextManager[AsyncIterator[Change]]:
        """Changes from the moment the context is entered: enter first, then read the range.

        A watcher that falls `WATCH_CHANGES_MAX` behind gets `Unavailable`; it starts over.
        """
        ...

    async def close(self) -> None: ...


class LeasingStore(MetadataStore, Protocol):
    """A store whose entries can live as long as somebody says so."""

    async def put(
        self, key: str, value: bytes, *, expected_revision: int | None = None, lease: int = 0
    ) -> int: ...

    async def grant(self, ttl_s: int) -> int:
        """A new lease. It ends after `ttl_s` in which nobody called `keep_alive`."""
        ...

    async def keep_alive(self, lease: int) -> bool:
        """Start the lease's time anew; False if it has ended, and its entries with it."""
        ...

    async def revoke(self, lease: int) -> None:
        """End the lease now, and its entries with it; one that has ended is no error."""
        ...


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
