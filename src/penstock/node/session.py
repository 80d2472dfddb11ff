"""One native connection, the node's end: frames in, engine calls, frames out.

A session greets, then serves requests and streams until either side closes. Whatever a caller may
make it hold is bounded: frame size, streams, calls, bytes either way (`flow`), and time without a
sign of life.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from penstock.errors import (
    Backpressure,
    Corruption,
    InvalidArgument,
    LimitExceeded,
    PenstockError,
    Unauthenticated,
    Unavailable,
)
from penstock.model.batch import Codec
from penstock.model.columns import Buffer
from penstock.model.topic import DELAY_MS_MAX, TopicKind
from penstock.node import (  # noqa: F401 - they register their methods
    dlq_calls,
    live_calls,
    log_calls,
    message_calls,
    search_calls,
    status_calls,
    transaction_calls,
)
from penstock.node.calls import Caller, dispatch_call
from penstock.node.engine import Engine
from penstock.node.flow import Flow
from penstock.node.greeting import read_greeting
from penstock.node.intake import enqueue, enqueue_of_delta
from penstock.node.logs import get_logger
from penstock.node.replicas import calls as _replica_calls  # noqa: F401 - registers its methods
from penstock.node.requests import ExtendRequest, Reply, ReturnRequest, TokenRequest
from penstock.node.routing.ports import PartitionPort
from penstock.node.subscriptions import Subscriptions
from penstock.node.tokens import Act, Tokens
from penstock.node.topic import Topic
from penstock.wire import frame as wire
from penstock.wire.compression import compressed, expanded, raw_length
from penstock.wire.frame import Frame, FrameDecoder, FrameFlag, FrameType
from penstock.wire.limits import CONTROL_BYTES_MAX, GREETING_BYTES_MAX, OPENING_BYTES_MAX
from penstock.wire.messages import (
    Call,
    Enqueue,
    Extend,
    OpenFollow,
    OpenLease,
    OpenLog,
    OpenSubscription,
    PutDelta,
    Return,
    Settle,
    SlowDown,
    Tell,
    pack,
    unpack,
)
from penstock.wire.negotiation import CODECS
from penstock.wire.outbox import Outbox, Transport
from penstock.wire.supply import OpenSupply

GREETING_S: Final = 10.0
FRAME_BYTES_MIN: Final = 64 << 10  # from which an unfinished frame counts in the node's bound
SLOW_DOWN_S_MAX: Final = 0.25  # then a producer tries again, and may be told again
CALLS_MAX: Final = 256  # administrative calls under way on one connection
READS_MAX: Final = 4  # of them, that are answered with messages: together they may be large
READS: Final = frozenset({"peek", "dlq_list", "vector_search"})
_numbers: Final = itertools.count(1)
log = get_logger(__name__)

Open = OpenLease | OpenLog | OpenSubscription | OpenFollow | OpenSupply | Tell | Call


class Session(asyncio.Protocol):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._number = next(_numbers)
        self._decoder = FrameDecoder(GREETING_BYTES_MAX)
        self._codec = Codec.NONE  # by which frames may be compressed
        self._transport: Transport | None = None
        self._greeted = False
        self._key_id: str | None = None
        self._peer = False  # another node of the cluster, as far as we can tell
        self._subscriptions = Subscriptions(
            engine, self._send, name=f"{engine.identity.node}/{engine.run_id}/{self._number}"
        )
        self._flow = Flow(engine)
        self._slowed: dict[str, float] = {}  # by topic: until when its producers know to hold back
        self._calls = 0
        self._reads = asyncio.Semaphore(READS_MAX)
        self.pending = 0  # requests without an answer yet
        self._watchdog: asyncio.TimerHandle | None = None

    # --- transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        if self._engine.config.cluster_name:
            self._transport = Outbox(self._transport, asyncio.get_running_loop().call_soon)
        self._flow.start(self._transport)
        if len(self._engine.connections) >= self._engine.config.limits.connections_max:
            self._refuse(LimitExceeded("too many connections", retry_after_s=1.0))
            return
        self._engine.connections.add(self)
        self._watch(GREETING_S, self._check_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._flow.end()
        self._engine.connections.discard(self)
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._subscriptions.close_all()

    def data_received(self, data: bytes) -> None:
        self._flow.heard = time.monotonic()
        try:
            frames = self._decoder.feed(data)
            if self._decoder.need > FRAME_BYTES_MIN or self._flow.frame_bytes:
                self._on_unfinished()
            for frame in frames:
                if self._transport is not None:
                    self._on_frame(frame)
        except Corruption as error:
            self._refuse(InvalidArgument(f"protocol error: {error.message}", field="frame"))

    def _on_unfinished(self) -> None:
        """Count what is here of a large frame. One that the node has no room for is refused before
        it is whole, and the rest of it passed over."""
        decoder = self._decoder
        try:
            if decoder.need > FRAME_BYTES_MIN:
                self._flow.check_room(decoder.need - self._flow.frame_bytes)
        except Backpressure as error:
            self._answer_error(decoder.drop(), error)
        large = decoder.need > FRAME_BYTES_MIN
        self._flow.hold_frame(decoder.buffered if large else 0)

    def pause_writing(self) -> None:
        self._subscriptions.block(True)

    def resume_writing(self) -> None:
        self._flow.on_drained()
        self._subscriptions.block(False)

    def _watch(self, after_s: float, then: Callable[[], None]) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._watchdog = asyncio.get_running_loop().call_later(after_s, then)

    def _check_alive(self) -> None:
        idle_s = self._engine.config.limits.idle_s
        silent_s = self._flow.silent_s()
        if self._greeted and silent_s <= idle_s:
            self._watch(max(0.05, idle_s - silent_s + 0.01), self._check_alive)
        elif self._flow.unread and self._transport is not None:
            self._transport.abort()  # it would not read a farewell either
        else:
            self.shut("no sign of life")

    def shut(self, reason: str) -> None:
        """End the connection; the client may reconnect."""
        if self._transport is not None:
            self._send(FrameType.NACK, 0, pack(Unavailable(reason).to_wire()))
            self._close(self._transport)

    def _close(self, transport: Transport) -> None:
        """End it when what was sent is read, or after a while."""
        transport.close()
        self._watch(self._engine.config.limits.idle_s, transport.abort)

    def drop_topic(self, topic: Topic) -> None:
        self._subscriptions.drop_topic(topic)

    def end_unreached(self, error: PenstockError) -> None:
        self._subscriptions.end_unreached(error)

    def revoke(self, key_id: str) -> None:
        """The key is revoked: whoever holds it is out at once."""
        if self._key_id == key_id:
            self._refuse(Unauthenticated("the API key is revoked", key_id=key_id))

    def _refuse(self, error: PenstockError) -> None:
        if self._transport is not None:
            self._send(FrameType.NACK, 0, pack(error.to_wire()))
            self._close(self._transport)
            self._transport = None

    def _send(self, type: FrameType, number: int, *payload: Buffer, flags: int = 0) -> None:
        if self._transport is None:
            return
        if self._codec and (packed := compressed(self._codec, payload)) is not None:
            payload, flags = tuple(packed), flags | FrameFlag.COMPRESSED
        self._transport.writelines(wire.encode(type, number, *payload, flags=flags))
        if self._subscriptions.blocked:
            self._flow.on_unsent()

    # --- frames ---

    def _on_frame(self, frame: Frame) -> None:
        if not self._greeted:
            self._greet(frame)
            return
        number = frame.sequence
        try:
            self._engine.check_serving()
            handler = self._HANDLERS.get(frame.type)
            if handler is None:
                raise InvalidArgument(f"a client does not send {frame.type.name}", field="type")
            handler(self, self._expanded(frame) if frame.flags & FrameFlag.COMPRESSED else frame)
        except Corruption as error:
            self._answer_error(number, InvalidArgument(error.message, field="payload"))
        except PenstockError as error:
            self._answer_error(number, error)
        except Exception:  # one bad request must not end the others'
            log.exception("request failed", type=frame.type.name)
            self._answer_error(number, PenstockError("internal error"))

    def _greet(self, frame: Frame) -> None:
        try:
            greeting = read_greeting(self._engine, frame)
        except PenstockError as error:
            self._refuse(error)
            return
        self._greeted = True
        self._key_id, self._peer = greeting.key_id, greeting.peer
        limits = self._engine.config.limits
        self._decoder.payload_bytes_max = limits.frame_bytes_max
        self._watch(limits.idle_s, self._check_alive)
        self._send(FrameType.HEARTBEAT, frame.sequence, pack(greeting.welcome))
        self._codec = CODECS.get(greeting.welcome.codec, Codec.NONE)

    def _expanded(self, frame: Frame) -> Frame:
        """A compressed frame as it was. What it needs counts before it is there."""
        self._flow.check_room(raw_length(frame))
        limits = self._engine.config.limits
        bytes_max = min(limits.frame_bytes_max, limits.raw_bytes_max)
        return expanded(frame, self._codec, bytes_max=bytes_max)

    def _check_peer(self) -> None:
        if not self._peer:
            raise Unauthenticated("only a node of the cluster may do this")

    def _on_batch(self, frame: Frame) -> None:
        control, data = unpack(frame.payload, Enqueue)
        if control.transaction:
            self._check_peer()
        self._enqueue(frame, control, data)

    def _on_delta(self, frame: Frame) -> None:
        control, data = unpack(frame.payload, PutDelta)
        if self._engine.topic(control.topic).config.kind is not TopicKind.DELTA:
            raise InvalidArgument(f"{control.topic} is no delta topic", field="topic")
        request, body = enqueue_of_delta(control, data)
        self._enqueue(frame, request, memoryview(body))

    def _enqueue(self, frame: Frame, control: Enqueue, data: memoryview) -> None:
        size = len(data)
        if control.codec and control.raw_lengths:  # it is kept decompressed until it is written
            size += min(sum(control.raw_lengths), self._engine.config.limits.raw_bytes_max)
        self._flow.check_room(size)
        reply = self._reply(frame, max(0, size))
        try:
            enqueue(self._engine, control, data, reply)
        except Corruption as error:
            reply(InvalidArgument(error.message, field="payload"))
        except PenstockError as error:
            reply(error)  # what is refused is no longer under way
        except Exception:
            log.exception("request failed", type=frame.type.name)
            reply(PenstockError("internal error"))
        else:
            ingesting = self._engine.topic(control.topic).ingesting
            if ingesting is not None and ingesting.queue.high and not control.forwarded:
                after_s = ingesting.queue.retry_after_s(self._engine.clock.now_ms())
                self._slow_down(control.topic, min(after_s, SLOW_DOWN_S_MAX))

    def _slow_down(self, topic: str, after_s: float) -> None:
        """Have a producer hold back, once in the time that it is asked to."""
        now = time.monotonic()
        if now < self._slowed.get(topic, 0.0):
            return
        self._slowed = {name: until for name, until in self._slowed.items() if until > now}
        self._slowed[topic] = now + after_s
        slow = SlowDown(max(1, round(after_s * 1000)), "many deltas wait to be written", topic)
        self._send(FrameType.BACKPRESSURE, 0, pack(slow))

    def _on_ack(self, frame: Frame) -> None:
        if not frame.flags & FrameFlag.ACK_WANTED:
            self._subscriptions.on_ack(frame.sequence, frame.payload)
            return
        control, data = unpack(frame.payload, Settle)
        topic = self._engine.queue(control.topic)
        self._for_tokens(
            frame, topic, control, data, lambda p, t, r: p.settling.settle(TokenRequest(t, r))
        )

    def _on_nack(self, frame: Frame) -> None:
        control, data = unpack(frame.payload, Return)
        topic = self._engine.queue(control.topic)
        if control.delay_ms is not None and not 0 <= control.delay_ms <= DELAY_MS_MAX:
            raise InvalidArgument(
                f"delay_ms must be from 0 to {DELAY_MS_MAX}", field="delay_ms", limit=DELAY_MS_MAX
            )
        reason = control.reason.encode()[:1024]

        def give_back(partition: PartitionPort, tokens: NDArray[np.uint64], reply: Reply) -> None:
            partition.settling.give_back(
                ReturnRequest(
                    tokens,
                    reply,
                    delay_ms=control.delay_ms,
                    reject=control.reject,
                    counted=control.counted,
                    reason=reason,
                )
            )

        self._for_tokens(frame, topic, control, data, give_back)

    def _on_heartbeat(self, frame: Frame) -> None:
        if not len(frame.payload):
            self._send(FrameType.HEARTBEAT, frame.sequence)
            return
        control, data = unpack(frame.payload, Extend)
        topic = self._engine.queue(control.topic)
        if not 0 < control.extend_ms <= topic.config.visibility_ms_max:
            raise InvalidArgument(
                f"extend_ms must be from 1 to {topic.config.visibility_ms_max}",
                field="extend_ms",
                limit=topic.config.visibility_ms_max,
            )
        self._for_tokens(
            frame,
            topic,
            control,
            data,
            lambda p, t, r: p.settling.extend(ExtendRequest(t, r, extend_ms=control.extend_ms)),
        )

    def _on_subscribe(self, frame: Frame) -> None:
        control: Open
        bytes_max = CONTROL_BYTES_MAX if self._peer else OPENING_BYTES_MAX
        control, _ = unpack(frame.payload, Open, bytes_max=bytes_max)  # type: ignore[arg-type]
        if isinstance(control, Call):
            self._on_call(frame, control)
            return
        if isinstance(control, Tell):
            self._check_peer()
            if self._engine.nodes is not None:
                self._engine.nodes.transport.on_told(control.told)
            return
        self._subscriptions.check_number(frame.sequence)
        if isinstance(control, OpenFollow):
            self._check_peer()
            self._subscriptions.open_follow(frame.sequence, control)
            return
        if isinstance(control, OpenSupply):
            self._check_peer()
            self._subscriptions.open_supply(frame.sequence, control)
            return
        if isinstance(control, OpenLease):
            self._subscriptions.open_lease(frame.sequence, control, self._key_id)
        elif isinstance(control, OpenSubscription):
            self._subscriptions.open_subscription(frame.sequence, control)
        else:
            self._subscriptions.open_log(frame.sequence, control)

    def _on_unsubscribe(self, frame: Frame) -> None:
        self._subscriptions.close(frame.sequence)
        self._send(FrameType.ACK, frame.sequence, pack({}))

    _HANDLERS: Final = {
        FrameType.BATCH: _on_batch,
        FrameType.DELTA: _on_delta,
        FrameType.ACK: _on_ack,
        FrameType.NACK: _on_nack,
        FrameType.HEARTBEAT: _on_heartbeat,
        FrameType.SUBSCRIBE: _on_subscribe,
        FrameType.UNSUBSCRIBE: _on_unsubscribe,
    }

    # --- answers ---

    def _reply(self, frame: Frame, size: int) -> Reply:
        """The callback that answers `frame`, and the accounting of what is under way. A delta that
        wants no answer gets one only if it is refused."""
        number = frame.sequence
        quiet = frame.type is FrameType.DELTA and not frame.flags & FrameFlag.ACK_WANTED
        self.pending += 1
        self._flow.take(size)

        def answer(result: object) -> None:
            self.pending -= 1
            self._flow.give_back(size)
            if self._transport is None:
                return
            if isinstance(result, PenstockError):
                self._answer_error(number, result)
            elif not quiet:
                self._send(FrameType.ACK, number, pack(result))

        return answer

    def _answer_error(self, number: int, error: PenstockError) -> None:
        self._send(FrameType.NACK, number, pack(error.to_wire()))

    # --- leases ---

    def _for_tokens(
        self,
        frame: Frame,
        topic: Topic,
        control: Settle | Return | Extend,
        data: memoryview,
        act: Act,
    ) -> None:
        """Split the tokens by partition and answer once with all the lost positions."""
        tokens = Tokens(topic, control, data)
        tokens.hand_out(act, self._reply(frame, len(data)))

    # --- calls ---

    def _on_call(self, frame: Frame, call: Call) -> None:
        if self._calls >= CALLS_MAX:
            raise LimitExceeded(f"{CALLS_MAX} calls are under way", limit=CALLS_MAX)
        self._calls += 1
        reply = self._reply(frame, len(frame.payload))
        caller = Caller(self._key_id, self._number, self._peer)
        self._engine.spawn(self._call(call, caller, reply), name=f"call-{call.method}")

    async def _call(self, call: Call, caller: Caller, reply: Reply) -> None:
        turn: AbstractAsyncContextManager[None] = (
            self._reads if call.method in READS else nullcontext()
        )
        try:
            async with turn:
                await self._flow.room()
                reply(await dispatch_call(self._engine, caller, call.method, call.arguments))
        except PenstockError as error:
            reply(error)
        except Exception:
            reply(PenstockError("internal error"))
            raise
        finally:
            self._calls -= 1
