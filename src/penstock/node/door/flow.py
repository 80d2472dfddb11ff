"""What one connection makes the node hold, and when its frames are handled.

Three things pile up for a client: requests that have no answer yet, the beginning of a frame whose
rest has not come, and answers that it does not read. All count in the node's budget (`budget`).
Past a bound of its own a connection is not read until there is less, and TCP holds the sender back.

It is the same between nodes, and cannot lock two of them up: the client's end of a connection
always reads, so what this end has to send gets away. Nor do acknowledgements of replicas wait
behind their slices: streams stop at the transport's own mark, far below `UNREAD_BYTES_MAX`.

The loop hands over up to 256 KiB at once. That may be thirteen thousand heartbeats, which would
take it a tenth of a second and more, again and again, and meanwhile nobody else is served: not even
the other nodes, who then take this one for dead. So all connections together get `TURN_S` of each
turn of the loop (`Rota`), and one of them `QUANTUM_S` of that while others wait. Who has more left
waits for its next turn, and is not read meanwhile. Whoever has not waited yet goes before those who
have: a caller with a request now and then is not behind a flood.

A request takes several turns of the loop, on its way in, to the disk and out, and would meet the
flood in each of them. So those who have waited are served in one turn, and then not for `RESTS` of
them. A turn in which nobody has anything to do is over in microseconds, thus a busy producer that
is alone loses nothing by it, and what several of them send is still written together.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

from penstock.config import Limits
from penstock.errors import Backpressure, Corruption, Unavailable
from penstock.node.clock import NextTurn
from penstock.node.door.budget import LITTLE_BYTES, MODEST_BYTES, WAIT_S, Account, Budget, Held
from penstock.wire.frame import Frame, FrameDecoder, WireTransport
from penstock.wire.messages import GREETING_BYTES_MAX

INFLIGHT_BYTES_MAX: Final = 32 << 20  # of one connection's requests
FRAMES_MAX: Final = 128  # decoded at once
LARGE_BYTES_MIN: Final = 64 << 10  # a larger frame counts by itself until it is dealt with
PART_BYTES_MIN: Final = 4 << 10  # from which the beginning of a frame counts
QUANTUM_S: Final = 0.002  # that one connection's frames take, if others wait
TURN_S: Final = 0.004  # that all connections' frames take in one turn of the loop
RESTS: Final = 3  # turns of the loop between two in which those are served who have waited
FEW: Final = 16  # frames that are handled together, so that they are written together
FEW_S: Final = 0.02  # unless they take so long
UNREAD_BYTES_MAX: Final = 4 << 20  # of one connection's answers, beside what the kernel has taken
READ_BYTES_PER_S: Final = 4 << 10  # slower than this, an answer is not being read
TURN_BYTES: Final = 1 << 20  # that streams read from logs in one turn of the loop
ROOM_S: Final = 0.25  # after which streams that found no room look again


class Unread:
    """What was sent and is not on its way yet, because the other end does not read."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self.size = 0
        self._whole = 0  # of what was sent since all was on its way: a part of it keeps all of it
        self.since = 0.0  # when it was last seen to get less, at the least rate; 0: all is sent
        self._size_then = 0

    def update(self, size: int, sent: int = 0) -> None:
        self.size = size
        self._whole = self._whole + sent if size else 0
        self._account.hold(max(size, self._whole), Held.ANSWERS)
        if not size:
            self.since = 0.0
        elif not self.since:
            self.since, self._size_then = time.monotonic(), size
            if self._account.holder is not None:
                self._account.budget.watch(self._account.holder)
        budget = self._account.budget
        if size > LITTLE_BYTES and budget.held > budget.bytes_large_max:
            budget.overrun(self._account)

    def overdue(self, write_s: float) -> bool:
        """Whether the other end has hardly read for so long. A byte now and then is not reading."""
        if not self.since:
            return False
        waited_s = time.monotonic() - self.since
        if self._size_then - self.size > READ_BYTES_PER_S * waited_s:
            self.since, self._size_then = time.monotonic(), self.size
            return False
        return waited_s > write_s


class Flow:
    """Invariant: `reading` says whether the transport is to read; both change in `_steer` alone."""

    def __init__(self, budget: Budget, limits: Limits, cut_off: Callable[[str], None]) -> None:
        self._budget, self._limits, self._cut_off = budget, limits, cut_off
        self.account = budget.account(self)
        self._transport: WireTransport | None = None
        self._requests = 0  # bytes without an answer
        self.frame_bytes = 0  # counted of a large frame that is not whole yet
        self._frame_due_s = 0.0  # that the frame on its way may take as a whole
        self.frame_since = 0.0  # when it began, or this end began to read again; 0: there is none
        self._drained = asyncio.Event()  # clear: too many answers are unread
        self._drained.set()
        self.reading = True
        self._halts = 0  # reasons of the session's own not to read
        self._unsent = Unread(self.account)
        self.heard = time.monotonic()  # the last sign of life

    def start(self, transport: WireTransport) -> None:
        self._transport = transport

    def end(self) -> None:
        """The connection is lost. Requests under way are given back as they are answered."""
        self._transport = None
        self.hold_frame(0)
        self._unsent.update(0)
        self.frame_since = 0.0
        self._budget.unwatch(self)
        self.account.close()
        self._drained.set()

    # --- what comes in ---

    def take(self, size: int) -> None:
        self._requests += size
        self.account.take(size, Held.REQUESTS)
        if self.account.held > LITTLE_BYTES:
            self._steer()

    def give_back(self, size: int) -> None:
        self._requests -= size
        self.account.give_back(size, Held.REQUESTS)
        if not self.reading:
            self._steer()

    def hold_frame(self, held: int) -> None:
        self.account.hold(held, Held.FRAMES)
        self._budget.parts += _if_little(held) - _if_little(self.frame_bytes)
        self.frame_bytes = held

    def on_unfinished(self, size: int, *, begun: bool) -> None:
        """So much is here of a frame that is not whole; `begun`: of another one than before."""
        if begun or not self.frame_since:
            self.frame_since = time.monotonic()
            self._budget.watch(self)
        self._frame_due_s = self._limits.frame_s + size / self._limits.bytes_per_s_min

    def halt(self) -> None:
        """Do not read until `go_on`, for a reason of the session's own. Halts add up."""
        self._halts += 1
        self._steer()

    def go_on(self) -> None:
        self._halts -= 1
        self._steer()

    # --- what goes out ---

    def on_unsent(self, sent: int) -> None:
        """So much was sent while the transport's buffer is full."""
        if self._transport is None:
            return
        self._unsent.update(self._transport.get_write_buffer_size(), sent)
        if self._unsent.size > UNREAD_BYTES_MAX and self._drained.is_set():
            self._drained.clear()
            self._steer()

    def on_drained(self) -> None:
        self._unsent.update(0)
        self._drained.set()
        self._steer()

    @property
    def unread(self) -> bool:
        return not self._drained.is_set()

    async def room(self) -> None:
        """Until there is room for another answer; raises `Unavailable` if there never will be."""
        if self.unread:
            await self._drained.wait()
            if self._transport is None:
                raise Unavailable("the connection was lost")

    # --- both ---

    def silent_s(self) -> float:
        """Time without a sign of life. Who is not read may still show one: by reading. And who is
        not read because this node is slow to answer need not show any."""
        if self._transport is not None and not self.reading:
            before = self._unsent.size
            self._unsent.update(self._transport.get_write_buffer_size())
            if not self.unread or self._unsent.size != before:
                self.heard = time.monotonic()
        return time.monotonic() - self.heard

    def _steer(self) -> None:
        reading = (
            self._requests <= INFLIGHT_BYTES_MAX
            and not self._halts
            and not self.unread
            and not (self._requests and self.account.crowded)
        )
        if reading is self.reading or self._transport is None:
            return
        self.reading = reading
        self.heard = time.monotonic()
        if reading:
            if self.frame_since:
                self.frame_since = time.monotonic()  # its sender could not go on before
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    # --- as the budget's holder ---

    def stuck_s(self) -> float:
        since = [t for t in (self.frame_since, self._unsent.since) if t]
        return time.monotonic() - min(since) if since else 0.0

    def overdue(self) -> str | None:
        now = time.monotonic()
        if self.frame_since and self.reading and now - self.frame_since > self._frame_due_s:
            return "frame"
        if self._unsent.since and self._transport is not None:
            self._unsent.update(self._transport.get_write_buffer_size())
            if self._unsent.overdue(self._limits.write_s):
                return "unread"
        if not self.frame_since and not self._unsent.since:
            self._budget.unwatch(self)
        return None

    def evict(self, reason: str) -> None:
        self.end()
        self._cut_off(reason)


class Rota:
    """Whose frames are handled next. Those who have just come go first, then the others in turn."""

    def __init__(self) -> None:
        self.fresh: deque[Inbox] = deque()
        self.others: deque[Inbox] = deque()
        self.used_s = 0.0  # of this turn of the loop
        self._rests = 0  # that are left
        self.schedule = NextTurn(self._turn).ask

    def _turn(self) -> None:
        self.used_s = 0.0
        while self.fresh and self.used_s < TURN_S:
            self.fresh.popleft().on_turn()
        if self._rests:
            self._rests -= 1
        elif self.others and self.used_s < TURN_S:
            self._rests = RESTS
            while self.others and self.used_s < TURN_S:
                self.others.popleft().on_turn()
        if self.fresh or self.others:
            self.schedule()


@dataclass(eq=False)
class Inbox:
    """Invariant: while frames are left over, the connection is halted and is in the rota once."""

    rota: Rota
    budget: Budget
    flow: Flow
    _: KW_ONLY
    on_frame: Callable[[Frame], None]
    on_dropped: Callable[[int, Backpressure], None]
    on_corrupt: Callable[[Corruption], None]
    decoder: FrameDecoder = field(default_factory=lambda: FrameDecoder(GREETING_BYTES_MAX))
    _frames: deque[Frame] = field(default_factory=deque)  # decoded and not handled
    _whole_bytes: int = 0  # of the large ones among these
    # What a transport hands over although it is not read.
    _late: list[bytes] = field(default_factory=list)
    _waits: bool = False  # for a turn
    _room_timer: asyncio.TimerHandle | None = None  # it waits for room for a frame
    _ended: bool = False

    def end(self) -> None:
        """The connection is over: handle nothing more, and keep nothing."""
        self._ended = True
        self._frames.clear()
        self._late.clear()
        self.decoder = FrameDecoder(GREETING_BYTES_MAX)
        self._stop_waiting_for_room()

    def feed(self, data: bytes) -> None:
        if self._ended:
            return
        if self._waits or self._room_timer is not None:
            self._late.append(data)
            return
        self._decode(data)
        if self._frames:
            self._handle_some(fresh=True)

    def on_turn(self) -> None:
        self._waits = False
        if self._ended:
            return
        self._handle_some(fresh=False)
        if not self._waits and not self._ended:
            self.flow.go_on()

    # --- frames ---

    def _handle_some(self, *, fresh: bool) -> None:
        """Handle what a turn allows, and wait for another one if there is more."""
        rota = self.rota
        started = now = time.perf_counter()
        if rota.used_s < TURN_S:
            quantum_s = QUANTUM_S if rota.fresh or rota.others else TURN_S - rota.used_s
            few = FEW
            while self._frames and now - started < (FEW_S if few > 0 else quantum_s):
                few -= 1
                frame = self._frames.popleft()
                if len(frame.payload) > LARGE_BYTES_MIN:  # from now on it counts as a request
                    self._whole_bytes -= len(frame.payload)
                    self._count()
                self.on_frame(frame)
                now = time.perf_counter()
                if not self._frames and (self.decoder.more or self._late):
                    self._decode(b"".join(self._late))
            rota.used_s += now - started
            rota.schedule()
        if not self._frames or self._ended:
            return
        if fresh:
            self.flow.halt()
        self._waits = True
        (rota.fresh if fresh and now == started else rota.others).append(self)
        rota.schedule()

    def _decode(self, data: bytes) -> None:
        self._late.clear()
        decoder = self.decoder
        try:
            frames = decoder.feed(data, FRAMES_MAX)
        except Corruption as error:
            self.on_corrupt(error)
            return
        self._frames.extend(frames)
        for frame in frames:
            if len(frame.payload) > LARGE_BYTES_MIN:
                self._whole_bytes += len(frame.payload)
        if decoder.buffered and not decoder.more:
            self._on_unfinished(begun=bool(frames))
        elif frames:
            self.flow.frame_since = 0.0
        if decoder.buffered or self._whole_bytes or self.flow.frame_bytes:
            self._count()

    def _count(self) -> None:
        """Large frames count until they are handled; of one that is not whole what is here does,
        unless it is very little: the node has room for so much of all its connections."""
        size = self.decoder.buffered
        part = size if size > PART_BYTES_MIN and not self.decoder.more else 0
        if self._whole_bytes + part != self.flow.frame_bytes:
            self.flow.hold_frame(self._whole_bytes + part)

    # --- a frame that is not whole ---

    def _on_unfinished(self, *, begun: bool) -> None:
        """A large frame that there is no room for has to wait; after a while it is refused before
        it is whole, and the rest of it passed over."""
        decoder, flow = self.decoder, self.flow
        flow.on_unfinished(decoder.buffered, begun=begun)
        if decoder.buffered <= PART_BYTES_MIN and decoder.need <= LARGE_BYTES_MIN:
            return
        self._count()
        if flow.account.makes_room(decoder.need - decoder.buffered, Held.FRAMES):
            return
        if decoder.need <= LARGE_BYTES_MIN:
            self._drop_frame()  # many small ones could wait here, with nearly all of their bytes
        else:
            flow.halt()
            self._room_timer = asyncio.get_running_loop().call_later(WAIT_S, self._refuse_frame)
            self.budget.waiting[self._look_for_room] = None

    def _look_for_room(self) -> None:
        if self._room_timer is None:
            return
        rest = self.decoder.need - self.decoder.buffered
        if self.flow.account.has_room(rest, Held.FRAMES):
            self._go_on()
        else:
            self.budget.waiting[self._look_for_room] = None

    def _refuse_frame(self) -> None:
        self._drop_frame()
        self._go_on()

    def _drop_frame(self) -> None:
        """Refuse the frame unless there is room for it after all."""
        decoder = self.decoder
        try:
            self.flow.account.check(decoder.need - decoder.buffered, Held.FRAMES)
        except Backpressure as error:
            self.flow.frame_since = 0.0
            self.on_dropped(decoder.drop(), error)
            self._count()

    def _go_on(self) -> None:
        if self._stop_waiting_for_room():
            late = b"".join(self._late)
            self._late.clear()
            if late:
                self.feed(late)
            self.flow.go_on()

    def _stop_waiting_for_room(self) -> bool:
        self.budget.waiting.pop(self._look_for_room, None)
        if self._room_timer is None:
            return False
        self._room_timer.cancel()
        self._room_timer = None
        return True


def _if_little(size: int) -> int:
    return size if size <= LITTLE_BYTES else 0


class ReadPace:
    def __init__(self) -> None:
        self.used = 0  # bytes, of this turn
        self.waiting: dict[Outlet, None] = {}  # their streams go on in another turn, in this order
        self.schedule = NextTurn(self._turn).ask

    def _turn(self) -> None:
        self.used = 0
        for outlet in list(self.waiting):
            if self.used >= TURN_BYTES:
                self.schedule()
                return
            del self.waiting[outlet]
            outlet.go_on()


class Outlet:
    """Room for what the streams of one connection read from logs in order to send it.

    It counts before it is read: of a hundred readers that all ask at once and then read nothing,
    only those are sent something for whom there is room. The others wait for it.
    """

    def __init__(self, pace: ReadPace, account: Account, go_on: Callable[[], None]) -> None:
        self._pace, self._account, self.go_on = pace, account, go_on
        self._taken = 0
        self._missed = False  # a stream waits until others have sent what they read
        self._timer: asyncio.TimerHandle | None = None  # nobody has room before it is over

    def take(self, size: int) -> bool:
        """Whether a stream may read so much now. If not, all are told to go on when they may."""
        if self._timer is not None:
            return False
        if self._taken and self._taken + size > UNREAD_BYTES_MAX:
            self._missed = True
            return False
        if self._pace.used >= TURN_BYTES:
            self._wait()
            return False
        # What is larger than most answers need not fit into the part for answers, which may be
        # smaller than the largest batch.
        kind = Held.READS if size <= MODEST_BYTES else Held.ANSWERS
        if not self._account.makes_room(size, kind):
            self._timer = asyncio.get_running_loop().call_later(ROOM_S, self._look_again)
            return False
        self._taken += size
        self._account.take(size, Held.READS)
        self._pace.used += size
        self._pace.schedule()
        return True

    def give_back(self, size: int) -> None:
        """What was read is sent. If nobody reads it, it counts as an answer from now on."""
        self._taken -= size
        self._account.give_back(size, Held.READS)
        if self._missed:
            self._missed = False
            self._wait()

    def _wait(self) -> None:
        self._pace.waiting[self] = None
        self._pace.schedule()

    def _look_again(self) -> None:
        self._timer = None
        self.go_on()

    def end(self) -> None:
        self._pace.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
