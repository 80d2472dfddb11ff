"""One budget for the bytes that callers make a node hold, whichever way they come in.

Requests under way, frames and bodies that are not whole, answers that nobody reads: each is taken
from the budget as it appears and given back as it goes. Every connection has an `Account`. The
accounts of one API key share a `Party`; without a key a connection is a party of its own, since an
address says little (behind a proxy, or on loopback, honest and hostile callers have the same one).

What a party may hold is not a fixed share. It is at most `SHARE` times what is still free, so that
one party alone may hold two thirds of the budget, and however many there are, something is left
for the next one. An eighth of the budget is out of reach for who holds much: an account that holds
little finds room there. If even that is full, the accounts that have been stuck for longest with
the most (a frame whose rest does not come, an answer that is not read) are cut off.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol

from penstock.errors import Backpressure
from penstock.node.clock import NextTurn

SHARE: Final = 2  # times what is free is what one party may hold
RESERVE_PART: Final = 8  # this part of the budget is for accounts that hold little
LITTLE_BYTES: Final = 256 << 10  # held by one account, its next request included
READ_BYTES: Final = 4 << 20  # taken for an answer with messages, until its size is known
MODEST_BYTES: Final = 2 * READ_BYTES  # for who holds no more, those who are stuck make way
WAIT_S: Final = 1.0  # for room, before a request is refused
RETRY_AFTER_S: Final = 0.25
WAKE_MAX: Final = 64  # of those who wait for room, that look for it in one turn of the loop
STUCK_S: Final = 0.5  # after which an account may be cut off for the room that it takes
RELIEF_S: Final = 0.05  # between two looks for stuck accounts: each looks at all of them
ANSWERS_PART: Final = 2  # this part of the budget is for answers with messages
# This part is for small frames that are not whole: each comes with a connection, and what that
# takes, by TLS most of all, does not count.
PARTS_PART: Final = 2
RELIEF_PART: Final = 8  # of the budget, which is freed at once
SWEEP_S: Final = 0.5  # between two looks for holders that are overdue


class Held(IntEnum):
    REQUESTS = 0  # without an answer yet
    FRAMES = 1  # not whole yet
    ANSWERS = 2  # not read yet
    BODIES = 3  # of HTTP requests, from the first byte to the answer
    MESSAGES = 4  # of gRPC calls, likewise
    READS = 5  # answers that are being made


class Holder(Protocol):
    """Whoever holds something for a caller, as far as the budget deals with it."""

    def stuck_s(self) -> float:
        """For how long something has waited for its caller; 0: nothing waits for it."""

    def overdue(self) -> str | None:
        """Why the caller is to be cut off now; None: it is not."""

    def evict(self, reason: str) -> None:
        """Cut the caller off. What is stuck is given back before this returns."""


@dataclass(eq=False)
class Party:
    held: int = 0
    accounts: int = 0


class Account:
    """What one connection holds. Invariant: `held` is the sum of `by_kind`, none is negative."""

    def __init__(self, budget: Budget, party: Party, holder: Holder | None) -> None:
        self.budget, self.party, self.holder = budget, party, holder
        self.held = 0
        self.by_kind = [0] * len(Held)
        party.accounts += 1

    def has_room(self, size: int, kind: Held | None = None) -> bool:
        budget = self.budget
        total = budget.held + size
        if kind is Held.READS and budget.answers + size > budget.bytes_max // ANSWERS_PART:
            return False
        if self.held + size <= LITTLE_BYTES:
            if kind is not Held.FRAMES:
                return total <= budget.bytes_max
            return total <= budget.bytes_little_max and budget.parts + size <= budget.parts_max
        return self.party.held + size <= SHARE * (budget.bytes_large_max - total)

    @property
    def crowded(self) -> bool:
        """Whether the caller holds so much that it had better not be read for a while: as much as
        is free, where twice that is what it is refused at."""
        free = self.budget.bytes_large_max - self.budget.held
        return self.held > LITTLE_BYTES and self.party.held > free

    def check(self, size: int, kind: Held | None = None) -> None:
        """Raise `Backpressure` unless there is room, if need be that of others that are stuck."""
        if self.has_room(size, kind) or self.makes_room(size, kind):
            return
        self.budget.on_refused("held_bytes")
        raise Backpressure(
            "this node holds as much for its callers as it may", retry_after_s=RETRY_AFTER_S
        )

    def makes_room(self, size: int, kind: Held | None = None) -> bool:
        if self.has_room(size, kind):
            return True
        if self.held + size <= MODEST_BYTES:
            self.budget.relieve(self, lambda: self._has_room_to_spare(size, kind))
        return self.has_room(size, kind)

    def _has_room_to_spare(self, size: int, kind: Held | None) -> bool:
        """Of answers that nobody reads, and of frames that are not whole, there may be many: others
        look for room as well."""
        budget = self.budget
        more = budget.bytes_max // RELIEF_PART
        little = self.held + size <= LITTLE_BYTES
        if kind is Held.FRAMES and little and budget.parts + more > budget.parts_max:
            return False
        return self.has_room(max(size, more) if kind is Held.READS else size, kind)

    def take(self, size: int, kind: Held) -> None:
        self.held += size
        self.by_kind[kind] += size
        self.party.held += size
        self.budget.held += size
        self.budget.by_kind[kind] += size

    def give_back(self, size: int, kind: Held) -> None:
        self.held -= size
        self.by_kind[kind] -= size
        self.party.held -= size
        self.budget.held -= size
        self.budget.by_kind[kind] -= size
        if self.budget.waiting:
            self.budget.wake()

    def hold(self, size: int, kind: Held) -> None:
        change = size - self.by_kind[kind]
        if change > 0:
            self.take(change, kind)
        elif change:
            self.give_back(-change, kind)

    async def acquire(self, size: int, kind: Held) -> None:
        """Take `size` once there is room for it; raises `Backpressure` if that takes too long."""
        if not self.makes_room(size, kind):
            woken = asyncio.Event()
            try:
                async with asyncio.timeout(WAIT_S):
                    while not self.has_room(size, kind):
                        woken.clear()
                        self.budget.waiting[woken.set] = None
                        await woken.wait()
            except TimeoutError:
                self.check(size, kind)
            finally:
                self.budget.waiting.pop(woken.set, None)
        self.take(size, kind)

    def join(self, key_id: str | None) -> None:
        """The caller has shown this key, and shares with its other connections from now on."""
        before, self.party = self.party, Party() if key_id is None else self.budget.party(key_id)
        self.party.held += self.held
        self.party.accounts += 1
        before.held -= self.held
        before.accounts -= 1

    def close(self) -> None:
        """The connection is gone. What is still under way for it is given back as it ends."""
        self.holder = None
        self.budget.forget(self)


class Budget:
    """Invariant: `held` is the sum over all accounts, and of `by_kind`."""

    def __init__(
        self,
        bytes_max: int,
        *,
        on_refused: Callable[[str], None] = lambda reason: None,
        on_evicted: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.bytes_max = bytes_max
        self.bytes_large_max = bytes_max - bytes_max // RESERVE_PART
        # Half of what is kept for those who hold little is for requests that are whole.
        self.bytes_little_max = (bytes_max + self.bytes_large_max) // 2
        self.parts_max = bytes_max // PARTS_PART
        self.on_refused, self.on_evicted = on_refused, on_evicted
        self.held = 0
        self.by_kind = [0] * len(Held)
        self.parts = 0  # of frames that are not whole, those of up to `LITTLE_BYTES`
        self.waiting: dict[Callable[[], None], None] = {}  # called when something is given back
        self._accounts: set[Account] = set()
        self._parties: dict[str, Party] = {}  # by API key, of those that are connected
        self._watched: set[Holder] = set()  # something of theirs waits for their caller
        self._sweeping: asyncio.TimerHandle | None = None
        self._relieved = 0.0  # when it was last looked for stuck accounts
        # Has those who wait for room look again.
        self.wake = NextTurn(self._wake).ask

    def account(self, holder: Holder | None = None, *, key_id: str | None = None) -> Account:
        made = Account(self, Party() if key_id is None else self.party(key_id), holder)
        self._accounts.add(made)
        return made

    def party(self, key_id: str) -> Party:
        return self._parties.setdefault(key_id, Party())

    def forget(self, account: Account) -> None:
        if account in self._accounts:
            self._accounts.discard(account)
            account.party.accounts -= 1
        if len(self._parties) > len(self._accounts):
            self._parties = {k: p for k, p in self._parties.items() if p.accounts or p.held}

    # --- room ---

    def _wake(self) -> None:
        """Those who find no room wait again, behind the others."""
        for look in list(itertools.islice(self.waiting, WAKE_MAX)):
            del self.waiting[look]
            look()

    @property
    def answers(self) -> int:
        return self.by_kind[Held.ANSWERS] + self.by_kind[Held.READS]

    def relieve(self, asking: Account, enough: Callable[[], bool]) -> None:
        """Cut off who has been stuck with the most for longest, and holds more than who asks."""
        now = time.monotonic()
        if now - self._relieved < RELIEF_S:
            return
        self._relieved = now
        stuck = [
            (account.held * stuck_s, account.holder)
            for account in self._accounts
            if account.held > asking.held and account.holder is not None
            and (stuck_s := account.holder.stuck_s()) > STUCK_S
        ]  # fmt: skip
        stuck.sort(key=lambda pair: -pair[0])
        comfortable = self.bytes_large_max - self.bytes_max // RELIEF_PART
        for _, holder in stuck:
            if self.held <= comfortable and enough():
                return
            self._evict(holder, "held_bytes")

    def overrun(self, account: Account) -> None:
        """What was sent to this account's caller is not read, and the budget is used up. Those that
        are stuck for longer go first; if none is, this one does, unless it was sent all that just
        now and had no time to read: large messages to an honest consumer come in one turn."""
        self.relieve(account, lambda: True)
        holder = account.holder
        if self.held > self.bytes_large_max and holder is not None and holder.stuck_s() > STUCK_S:
            self._evict(holder, "held_bytes")

    # --- deadlines ---

    def watch(self, holder: Holder) -> None:
        """Something of the holder's waits for its caller: look now and then whether too long."""
        self._watched.add(holder)
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def unwatch(self, holder: Holder) -> None:
        self._watched.discard(holder)

    def _sweep(self) -> None:
        for holder in list(self._watched):
            if reason := holder.overdue():
                self._evict(holder, reason)
        self._sweeping = None
        if self._watched:
            self._sweeping = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def _evict(self, holder: Holder, reason: str) -> None:
        self._watched.discard(holder)
        holder.evict(reason)
        self.on_evicted(reason)
