"""The bytes that one connection sends, as frames, in turns that leave room for the others.

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
from typing import Final

from penstock.errors import Backpressure, Corruption
from penstock.node.door.budget import WAIT_S, Budget, Held
from penstock.node.door.flow import Flow
from penstock.wire.frame import LARGE_BYTES_MIN, Frame, FrameDecoder
from penstock.wire.limits import GREETING_BYTES_MAX

FRAMES_MAX: Final = 128  # decoded at once
PART_BYTES_MIN: Final = 4 << 10  # from which the beginning of a frame counts
QUANTUM_S: Final = 0.002  # that one connection's frames take, if others wait
TURN_S: Final = 0.004  # that all connections' frames take in one turn of the loop
RESTS: Final = 3  # turns of the loop between two in which those are served who have waited
FEW: Final = 16  # frames that are handled together, so that they are written together
FEW_S: Final = 0.02  # unless they take so long


class Rota:
    """Whose frames are handled next. Those who have just come go first, then the others in turn."""

    def __init__(self) -> None:
        self._fresh: deque[Inbox] = deque()
        self._others: deque[Inbox] = deque()
        self._used_s = 0.0  # of this turn of the loop
        self._scheduled = False
        self._rests = 0  # that are left

    @property
    def open(self) -> bool:
        """Whether somebody may be served at once."""
        return self._used_s < TURN_S

    @property
    def quantum_s(self) -> float:
        """For how long one connection's frames may be handled now."""
        return QUANTUM_S if self._fresh or self._others else TURN_S - self._used_s

    def spend(self, seconds: float) -> None:
        self._used_s += seconds
        self._schedule()

    def add(self, inbox: Inbox, *, fresh: bool) -> None:
        (self._fresh if fresh else self._others).append(inbox)
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        self._used_s = 0.0
        self._serve(self._fresh)
        if self._rests:
            self._rests -= 1
        elif self._others and self.open:
            self._rests = RESTS
            self._serve(self._others)
        if self._fresh or self._others:
            self._schedule()

    def _serve(self, waiting: deque[Inbox]) -> None:
        while self.open and waiting:
            waiting.popleft().on_turn()


class Inbox:
    """Invariant: while frames are left over, the connection is halted and is in the rota once."""

    def __init__(
        self,
        rota: Rota,
        budget: Budget,
        flow: Flow,
        *,
        on_frame: Callable[[Frame], None],
        on_dropped: Callable[[int, Backpressure], None],
        on_corrupt: Callable[[Corruption], None],
    ) -> None:
        self._rota, self._budget, self._flow = rota, budget, flow
        self._on_frame, self._on_dropped, self._on_corrupt = on_frame, on_dropped, on_corrupt
        self._decoder = FrameDecoder(GREETING_BYTES_MAX)
        self._frames: deque[Frame] = deque()  # decoded and not handled
        self._whole_bytes = 0  # of the large ones among these
        self._late: list[bytes] = []  # what a transport hands over although it is not read
        self._waits = False  # for a turn
        self._room_timer: asyncio.TimerHandle | None = None  # it waits for room for a frame
        self._ended = False

    @property
    def buffered(self) -> int:
        """Of a frame that is not whole."""
        return self._decoder.buffered

    def allow(self, payload_bytes_max: int) -> None:
        """Frames may be so large from now on."""
        self._decoder.payload_bytes_max = payload_bytes_max

    def end(self) -> None:
        """The connection is over: handle nothing more, and keep nothing."""
        self._ended = True
        self._frames.clear()
        self._late.clear()
        self._decoder = FrameDecoder(GREETING_BYTES_MAX)
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
            self._flow.go_on()

    # --- frames ---

    def _handle_some(self, *, fresh: bool) -> None:
        """Handle what a turn allows, and wait for another one if there is more."""
        started = now = time.perf_counter()
        if self._rota.open:
            quantum_s = self._rota.quantum_s
            few = FEW
            while self._frames and now - started < (FEW_S if few > 0 else quantum_s):
                few -= 1
                self._handle(self._frames.popleft())
                now = time.perf_counter()
                if not self._frames and (self._decoder.more or self._late):
                    self._decode(b"".join(self._late))
            self._rota.spend(now - started)
        if not self._frames or self._ended:
            return
        if fresh:
            self._flow.halt()
        self._waits = True
        self._rota.add(self, fresh=fresh and now == started)

    def _handle(self, frame: Frame) -> None:
        if len(frame.payload) > LARGE_BYTES_MIN:  # from now on it counts as a request
            self._whole_bytes -= len(frame.payload)
            self._count()
        self._on_frame(frame)

    def _decode(self, data: bytes) -> None:
        self._late.clear()
        decoder = self._decoder
        try:
            frames = decoder.feed(data, FRAMES_MAX)
        except Corruption as error:
            self._on_corrupt(error)
            return
        self._frames.extend(frames)
        for frame in frames:
            if len(frame.payload) > LARGE_BYTES_MIN:
                self._whole_bytes += len(frame.payload)
        if decoder.buffered and not decoder.more:
            self._on_unfinished(begun=bool(frames))
        elif frames:
            self._flow.on_whole()
        self._count()

    def _count(self) -> None:
        """Large frames count until they are handled; of one that is not whole what is here does,
        unless it is very little: the node has room for so much of all its connections."""
        size = self._decoder.buffered
        part = size if size > PART_BYTES_MIN and not self._decoder.more else 0
        if self._whole_bytes + part != self._flow.frame_bytes:
            self._flow.hold_frame(self._whole_bytes + part)

    # --- a frame that is not whole ---

    def _on_unfinished(self, *, begun: bool) -> None:
        """A large frame that there is no room for has to wait; after a while it is refused before
        it is whole, and the rest of it passed over."""
        decoder, flow = self._decoder, self._flow
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
            self._budget.waiting[self._look_for_room] = None

    def _look_for_room(self) -> None:
        if self._room_timer is None:
            return
        rest = self._decoder.need - self._decoder.buffered
        if self._flow.account.has_room(rest, Held.FRAMES):
            self._go_on()
        else:
            self._budget.waiting[self._look_for_room] = None

    def _refuse_frame(self) -> None:
        self._drop_frame()
        self._go_on()

    def _drop_frame(self) -> None:
        """Refuse the frame unless there is room for it after all."""
        decoder = self._decoder
        try:
            self._flow.account.check(decoder.need - decoder.buffered, Held.FRAMES)
        except Backpressure as error:
            self._flow.on_whole()
            self._on_dropped(decoder.drop(), error)
            self._count()

    def _go_on(self) -> None:
        if self._stop_waiting_for_room():
            late = b"".join(self._late)
            self._late.clear()
            if late:
                self.feed(late)
            self._flow.go_on()

    def _stop_waiting_for_room(self) -> bool:
        self._budget.waiting.pop(self._look_for_room, None)
        if self._room_timer is None:
            return False
        self._room_timer.cancel()
        self._room_timer = None
        return True
