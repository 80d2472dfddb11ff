"""One native connection, the node's end: frames in, engine calls, frames out; and its listener.

A session greets, then serves requests and streams until either side closes. Whatever a caller may
make it hold is bounded: frame size, streams, calls, bytes either way (`flow`), and time without a
sign of life.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import ssl
import time
from collections.abc import Callable
from functools import partial
from typing import Final, cast

from penstock.errors import (
    Corruption,
    InvalidArgument,
    LimitExceeded,
    PenstockError,
    Unauthenticated,
    Unavailable,
)
from penstock.model.batch import Codec
from penstock.model.columns import Buffer
from penstock.model.entries import DELAY_MS_MAX
from penstock.model.topic import TopicKind
from penstock.model.version import __version__
from penstock.node.calls import cluster, live, messages  # noqa: F401 - they register their methods
from penstock.node.calls import log as log_calls  # noqa: F401 - it does, too
from penstock.node.calls.table import CLUSTER_KEY_ID, Caller, dispatch_call
from penstock.node.door.budget import READ_BYTES, Budget, Held
from penstock.node.door.doorway import address_of
from penstock.node.door.flow import Flow, Inbox
from penstock.node.door.tls import TlsLink
from penstock.node.engine import Engine
from penstock.node.observe.logs import get_logger
from penstock.node.serve.intake import Make, Tokens, enqueue, enqueue_of_delta
from penstock.node.serve.topic import ServedTopic
from penstock.node.session.stream_table import Opening, StreamTable
from penstock.node.write import ExtendRequest, Reply, ReturnRequest, TokenRequest
from penstock.wire import frame as wire
from penstock.wire.frame import (
    CODECS,
    Frame,
    FrameFlag,
    FrameType,
    Outbox,
    WireTransport,
    choose_version,
    compressed,
    expanded,
    raw_length,
)
from penstock.wire.messages import (
    CONTROL_BYTES_MAX,
    OPENING_BYTES_MAX,
    Call,
    Enqueue,
    Extend,
    Hello,
    OpenFollow,
    OpenSupply,
    PutDelta,
    Return,
    Settle,
    SlowDown,
    Tell,
    Welcome,
    bounded,
    pack,
    traits_of,
    unpack,
)

CALLS_MAX: Final = 256  # administrative calls under way on one connection
READS_MAX: Final = 4  # of them, that are answered with messages: together they may be large
SHARED_CALLS_MAX: Final = 16_384  # the same of a gateway's connection, which bounds its callers
SLOW_DOWN_S_MAX: Final = 0.25  # then a producer tries again, and may be told again
_numbers: Final = itertools.count(1)
log = get_logger(__name__)

Open = Opening | Tell | Call


class CallDesk:
    """The administrative calls of one connection: how many are under way, how large answers are.

    A call that is answered with messages may be large, and its caller may not read: it begins when
    the answers before it are read, when there is room for its own in the budget, and a few at a
    time: an answer that is being made takes several times its size.

    `shared`: the connection is a gateway's, for many callers, which it counts itself."""

    def __init__(self, engine: Engine, flow: Flow, *, shared: bool) -> None:
        self._engine, self._flow = engine, flow
        self._under_way = 0
        self._most = SHARED_CALLS_MAX if shared else CALLS_MAX
        self._reads = asyncio.Semaphore(READS_MAX)

    def begin(self, call: Call, caller: Caller, reply: Reply) -> None:
        if self._under_way >= self._most:
            reply(LimitExceeded(f"{self._most} calls are under way", limit=self._most))
            return
        self._under_way += 1
        self._engine.spawn(self._answer(call, caller, reply), name=f"call-{call.method}")

    async def _answer(self, call: Call, caller: Caller, reply: Reply) -> None:
        try:
            if traits_of(call.method).large:
                async with self._reads:
                    await self._flow.room()
                    reply(await self._read(call, caller))
            else:
                await self._flow.room()
                reply(await dispatch_call(self._engine, caller, call.method, call.arguments))
        except PenstockError as error:
            reply(error)
        except Exception:
            reply(PenstockError("internal error"))
            raise
        finally:
            self._under_way -= 1

    async def _read(self, call: Call, caller: Caller) -> dict[str, object]:
        """The answer of a call that may be large; there is room for it before it is made."""
        account = self._flow.account
        await account.acquire(READ_BYTES, Held.READS)
        try:
            async with self._engine.reads:
                return await dispatch_call(self._engine, caller, call.method, call.arguments)
        finally:
            account.give_back(READ_BYTES, Held.READS)


class Session(asyncio.Protocol):
    """`budget`: of what its caller makes the node hold; none is given: the node's."""

    def __init__(self, engine: Engine, budget: Budget | None = None) -> None:
        self._engine = engine
        self._number = next(_numbers)
        self._codec = Codec.NONE  # by which frames may be compressed
        self._transport: WireTransport | None = None
        self.address = ""  # where the caller is; empty: in this process
        self._greeted = False
        self._key_id: str | None = None
        self._peer = False  # another node of the cluster, as far as we can tell
        limits = engine.config.limits
        budget = budget or engine.budget
        self._flow = Flow(budget, limits, self._cut_off)
        name = f"{engine.identity.node}/{engine.run_id}/{self._number}"
        self.streams = StreamTable(engine, self._send, self._flow.account, name=name)
        self._inbox = Inbox(
            engine.rota,
            budget,
            self._flow,
            on_frame=self._on_frame,
            on_dropped=self._answer_error,
            on_corrupt=self._on_corrupt,
        )
        self._slowed: dict[str, float] = {}  # by topic: until when its producers know to hold back
        self._calls = CallDesk(engine, self._flow, shared=budget is not engine.budget)
        self.pending = 0  # requests without an answer yet
        self._watchdog: asyncio.TimerHandle | None = None

    # --- transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        # A node alone answers each request at once: answers in bursts make its clients send in
        # bursts, and then one side waits for the other.
        if self._engine.config.cluster_name:
            self._transport = Outbox(self._transport, asyncio.get_running_loop().call_soon)
        self._flow.start(self._transport)
        self._engine.connections.add(self)
        self.address = address_of(transport)
        if self.address:
            self._engine.doorway.enter(self)
        self._watch(self._engine.config.limits.greeting_s, self._check_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._inbox.end()
        self._flow.end()
        self._engine.connections.discard(self)
        self._engine.doorway.leave(self)
        if self._watchdog is not None:
            self._watchdog.cancel()
        self.streams.close_all()

    def data_received(self, data: bytes) -> None:
        self._flow.heard = time.monotonic()
        self._inbox.feed(data)
        if not self._greeted:
            self._engine.doorway.hold(self, self._inbox.decoder.buffered)

    def _on_corrupt(self, error: Corruption) -> None:
        self._refuse(InvalidArgument(f"protocol error: {error.message}", field="frame"))

    def _cut_off(self, reason: str) -> None:
        if reason == "frame":
            self._refuse(LimitExceeded("a frame was not whole in time", retry_after_s=1.0))
        elif self._transport is not None:
            self._transport.abort()  # it would not read a farewell
        self._inbox.end()

    def pause_writing(self) -> None:
        self.streams.block(True)

    def resume_writing(self) -> None:
        self._flow.on_drained()
        self.streams.block(False)

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

    def part(self, reason: str) -> None:
        """Say that the node goes, and leave it to the client to end the connection. Until then what
        it asks is refused by name: were the connection closed on requests that are on their way,
        the system would reset it, and answers that nobody has read yet would be lost."""
        self._answer_error(0, Unavailable(reason, leaving=True))

    def shut(self, reason: str) -> None:
        if self._transport is not None:
            self._answer_error(0, Unavailable(reason))
            self._close(self._transport)

    def _close(self, transport: WireTransport) -> None:
        """End it when what was sent is read, or after a while."""
        transport.close()
        self._watch(self._engine.config.limits.idle_s, transport.abort)

    def idle_s(self) -> float:
        busy = self.pending or self.streams.any
        return 0.0 if busy else time.monotonic() - self._flow.heard

    def expel(self) -> None:
        if self._greeted:
            self.shut("too many connections")
        elif self._transport is not None:
            self._transport.abort()

    def revoke(self, key_id: str) -> None:
        if self._key_id == key_id:
            self._refuse(Unauthenticated("the API key is revoked", key_id=key_id))

    def _refuse(self, error: PenstockError) -> None:
        if self._transport is not None:
            self._answer_error(0, error)
            self._close(self._transport)
            self._transport = None
            self._inbox.end()

    def _send(self, type: FrameType, number: int, *payload: Buffer, flags: int = 0) -> None:
        if self._transport is None:
            return
        if self._codec and (packed := compressed(self._codec, payload)) is not None:
            payload, flags = tuple(packed), flags | FrameFlag.COMPRESSED
        self._transport.writelines(wire.encode(type, number, *payload, flags=flags))
        if self.streams.blocked:
            self._flow.on_unsent(sum(map(len, payload)))

    # --- frames ---

    def _on_frame(self, frame: Frame) -> None:
        if not self._greeted:
            self._greet(frame)
            return
        number = frame.sequence
        if self._engine.refusal is not None:
            self._answer_error(number, self._engine.refusal)
            return
        try:
            handler = self._HANDLERS.get(frame.type)
            if handler is None:
                raise InvalidArgument(f"a client does not send {frame.type.name}", field="type")
            handler(self, self._expanded(frame) if frame.flags & FrameFlag.COMPRESSED else frame)
        except Exception as error:  # noqa: BLE001 - one bad request must not end the others'
            self._answer_error(number, _told(error, frame.type))

    def _greet(self, frame: Frame) -> None:
        try:
            welcome, self._key_id, self._peer = _read_greeting(self._engine, frame)
            if self.address:
                self._engine.doorway.admit(self)
        except PenstockError as error:
            if isinstance(error, Unauthenticated):
                self._engine.metrics.auth_failures.add()
            self._refuse(error)
            return
        self._greeted = True
        limits = self._engine.config.limits
        self._inbox.decoder.payload_bytes_max = limits.frame_bytes_max
        if self._key_id is not None and not self._peer:
            self._flow.account.join(self._key_id)
        self._watch(limits.idle_s, self._check_alive)
        self._send(FrameType.HEARTBEAT, frame.sequence, pack(welcome))
        self._codec = CODECS.get(welcome.codec, Codec.NONE)

    def _expanded(self, frame: Frame) -> Frame:
        """A compressed frame as it was. What it needs counts before it is there."""
        limits = self._engine.config.limits
        bytes_max = min(limits.frame_bytes_max, limits.raw_bytes_max)
        self._flow.account.check(min(raw_length(frame), bytes_max))
        return expanded(frame, self._codec, bytes_max=bytes_max)

    def _check_peer(self) -> None:
        if not self._peer:
            raise Unauthenticated("only a node of the cluster may do this")

    def _on_put(self, frame: Frame) -> None:
        """Messages to enqueue, or one delta, which is enqueued as its topic's messages are."""
        if frame.type is FrameType.DELTA:
            control, data = self._delta(frame)
        else:
            control, data = unpack(frame.payload, Enqueue)
            if control.forwarded or control.transaction or control.home:
                self._check_peer()
        size, raw_bytes_max = len(data), self._engine.config.limits.raw_bytes_max
        if control.codec and control.raw_lengths:  # it is kept decompressed until it is written
            size = max(size, min(sum(control.raw_lengths), raw_bytes_max))
        self._flow.account.check(size)
        topic = self._engine.topics[control.topic]
        reply = self._reply(frame, size)
        try:
            enqueue(topic, control, data, reply, raw_bytes_max=raw_bytes_max)
        except Exception as error:  # noqa: BLE001 - as for any request
            reply(_told(error, frame.type))  # what is refused is no longer under way
            return
        if topic.ingest is not None and topic.ingest.queue.high and not control.forwarded:
            after_s = topic.ingest.queue.retry_after_s(self._engine.clock.now_ms())
            self._slow_down(control.topic, min(after_s, SLOW_DOWN_S_MAX))

    def _delta(self, frame: Frame) -> tuple[Enqueue, memoryview]:
        control, data = unpack(frame.payload, PutDelta)
        if self._engine.topics[control.topic].config.kind is not TopicKind.DELTA:
            raise InvalidArgument(f"{control.topic} is no delta topic", field="topic")
        request, body = enqueue_of_delta(control, data)
        return request, memoryview(body)

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
            self.streams.on_ack(frame.sequence, frame.payload)
            return
        control, data = unpack(frame.payload, Settle)
        self._for_tokens(frame, self._engine.queue(control.topic), control, data, TokenRequest)

    def _on_nack(self, frame: Frame) -> None:
        control, data = unpack(frame.payload, Return)
        topic = self._engine.queue(control.topic)
        if control.delay_ms is not None:
            bounded(control.delay_ms, 0, DELAY_MS_MAX, "delay_ms")
        give_back = partial(
            ReturnRequest,
            delay_ms=control.delay_ms,
            reject=control.reject,
            counted=control.counted,
            reason=control.reason.encode()[:1024],
        )
        self._for_tokens(frame, topic, control, data, give_back)

    def _on_heartbeat(self, frame: Frame) -> None:
        if not len(frame.payload):
            self._send(FrameType.HEARTBEAT, frame.sequence)
            return
        control, data = unpack(frame.payload, Extend)
        topic = self._engine.queue(control.topic)
        bounded(control.extend_ms, 1, topic.config.visibility_ms_max, "extend_ms")
        extend = partial(ExtendRequest, extend_ms=control.extend_ms)
        self._for_tokens(frame, topic, control, data, extend)

    def _on_subscribe(self, frame: Frame) -> None:
        control: Open
        bytes_max = CONTROL_BYTES_MAX if self._peer else OPENING_BYTES_MAX
        control, _ = unpack(frame.payload, Open, bytes_max=bytes_max)  # type: ignore[arg-type]
        if isinstance(control, Call):
            self._on_call(frame, control)
            return
        if isinstance(control, Tell):
            self._check_peer()
            self._engine.nodes.transport.on_told(control.told)
            return
        if isinstance(control, OpenFollow | OpenSupply) or getattr(control, "forwarded", False):
            self._check_peer()
        self.streams.open(frame.sequence, control, self._key_id)

    def _on_unsubscribe(self, frame: Frame) -> None:
        self.streams.close(frame.sequence)
        self._send(FrameType.ACK, frame.sequence, pack({}))

    _HANDLERS: Final = {
        FrameType.BATCH: _on_put,
        FrameType.DELTA: _on_put,
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
            if isinstance(result, PenstockError):
                self._answer_error(number, result)
            elif not quiet:
                self._answer(number, result)

        return answer

    def _answer(self, number: int, result: object) -> None:
        if self._transport is None:
            return
        payload = pack(result)
        if len(payload) <= wire.PAYLOAD_BYTES_MAX:
            self._send(FrameType.ACK, number, payload)
        else:
            self._answer_error(number, _too_large(len(payload)))

    def _answer_error(self, number: int, error: PenstockError) -> None:
        self._send(FrameType.NACK, number, pack(error.to_wire()))

    def _for_tokens(
        self,
        frame: Frame,
        topic: ServedTopic,
        control: Settle | Return | Extend,
        data: memoryview,
        make: Make,
    ) -> None:
        if control.forwarded:
            self._check_peer()
        tokens = Tokens(topic, control, data)
        tokens.hand_out(make, self._reply(frame, len(data)))

    def _on_call(self, frame: Frame, call: Call) -> None:
        caller = Caller(
            self._key_id, self._number, self._peer, gone=lambda: self._transport is None
        )
        self._calls.begin(call, caller, self._reply(frame, len(frame.payload)))


def _told(error: Exception, type: FrameType) -> PenstockError:
    if isinstance(error, Corruption):
        return InvalidArgument(error.message, field="payload")
    if isinstance(error, PenstockError):
        return error
    log.error("request failed", type=type.name, exc_info=error)
    return PenstockError("internal error")


def _too_large(size: int) -> InvalidArgument:
    most = wire.PAYLOAD_BYTES_MAX
    message = f"the answer has {size} bytes, over {most}: ask for less"
    return InvalidArgument(message, field="arguments", limit=most)


async def listen(
    engine: Engine, *, host: str, port: int, tls: ssl.SSLContext | None
) -> asyncio.Server:
    """Accept native connections; the server tells its real port where 0 was asked for."""
    loop = asyncio.get_running_loop()

    def accept() -> asyncio.BaseProtocol:
        session = partial(Session, engine)
        return session() if tls is None else TlsLink(tls, session, engine.doorway)

    try:
        return await loop.create_server(accept, host, port, backlog=1024)
    except OSError as error:
        raise Unavailable(f"cannot listen on {host}:{port}: {error.strerror or error}") from error


def port_of(server: asyncio.Server) -> int:
    return int(server.sockets[0].getsockname()[1])


# --- the first frame of a connection: what is spoken on it, and in whose name ---


def _read_greeting(engine: Engine, frame: Frame) -> tuple[Welcome, str | None, bool]:
    """What is agreed on, the key, and whether it counts as a node; raises the refusal."""
    if frame.type is not FrameType.HEARTBEAT:
        raise Unauthenticated("the first frame must be a greeting")
    if frame.flags & FrameFlag.COMPRESSED:
        raise InvalidArgument("a greeting is not compressed", field="flags")
    try:
        hello, _ = unpack(frame.payload, Hello)
    except Corruption as error:
        raise InvalidArgument(error.message, field="payload") from error
    version = choose_version(hello.versions)
    # The first that is offered and known here; none: frames stay as they are.
    codec = next((name for name in hello.codecs if name in CODECS), "")
    key_id, peer = _authenticated(engine, hello)
    limits, name = engine.config.limits, engine.config.cluster_name
    heartbeat_ms = int(limits.idle_s * 1000 / 3)
    welcome = Welcome(
        version, __version__, engine.identity.node, heartbeat_ms, limits.frame_bytes_max, name,
        codec,
    )  # fmt: skip
    return welcome, key_id, peer


def _authenticated(engine: Engine, hello: Hello) -> tuple[str | None, bool]:
    """The caller's key, and whether it counts as a node. Nodes show the cluster's key in a field of
    its own; as an API key it is as good as any wrong one. In a cluster that has no key everybody
    who connects may be a node, which only one on loopback can be."""
    config = engine.config
    cluster_key = config.cluster.key
    if hello.cluster_key is not None:
        shown = hello.cluster_key.encode()
        if not cluster_key or not hmac.compare_digest(shown, cluster_key.encode()):
            raise Unauthenticated("this is not the cluster's key")
        return CLUSTER_KEY_ID, True
    key_id = None
    if hello.api_key is not None or config.keys_required:
        key_id = engine.keys.verify(hello.api_key)
    return key_id, config.cluster.enabled and not cluster_key and not config.keys_required
