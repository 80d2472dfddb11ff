"""A session's streams: opened and closed by the client, credited by it, ended by the node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Final

import msgspec

from penstock.errors import (
    FailedPrecondition,
    InvalidArgument,
    LimitExceeded,
    NotFound,
    PenstockError,
    Unavailable,
    WrongEpoch,
)
from penstock.model.columns import Buffer
from penstock.model.entries import BATCH_ENTRIES_MAX, most_urgent
from penstock.model.topic import CONSUMER_BYTES_MAX, TopicConfig, TopicKind
from penstock.node.calls.table import nobody_serves
from penstock.node.cluster.transport import FollowOutput
from penstock.node.door.budget import Account
from penstock.node.door.flow import Outlet
from penstock.node.engine import Engine
from penstock.node.live.cursors import SINK_PREFIX
from penstock.node.live.hub import Hub
from penstock.node.live.subscription import Subscription
from penstock.node.replica.host import Host
from penstock.node.route import PeerPort
from penstock.node.serve.dispatch import Demand
from penstock.node.serve.streams import ConsumerStream, LogSource, ReaderStream, check_window, gone
from penstock.node.serve.topic import ServedTopic, check_id
from penstock.replication.replica import LogHealth, Role
from penstock.replication.sender import Credit
from penstock.wire.frame import FrameFlag, FrameType, flags_of_class
from penstock.wire.messages import (
    BATCH_MS_MAX,
    ROUTE_BYTES_MAX,
    Asked,
    Changes,
    Grant,
    LogSlice,
    OpenFollow,
    OpenLease,
    OpenLog,
    OpenSubscription,
    OpenSupply,
    bounded,
    pack,
    unpack,
)

RELAYS_BYTES: Final = 32 << 20  # that a connection's relays share
RELAY_BYTES_MAX: Final = 4 << 20
RELAY_BYTES_MIN: Final = 64 << 10
STARTS: Final = ("now", "sequence", "time", "cursor")
_AT_MAX: Final = (1 << 63) - 1
Send = Callable[..., None]  # (type, number, *payload, flags=)


@dataclass(slots=True, eq=False)
class LiveStream:
    """A subscription. The hub of the topic decides what is sent and when. It may have to wait until
    the hub knows what the log has released so far; the stream is there from the request on, so that
    the client can end it meanwhile."""

    number: int
    partition: int
    _: KW_ONLY
    send: Send
    end: Callable[[PenstockError], None]
    _opening: asyncio.Task[None] | None = None  # while the hub is asked
    _subscription: Subscription | None = None
    _blocked: bool = False
    open: bool = True

    async def subscribe(self, hub: Hub, control: OpenSubscription) -> None:
        if not self.open:
            return
        self._opening = asyncio.current_task()
        try:
            found = await hub.subscribe(
                control.partition, control, send=self._on_changes, fail=self._fail
            )
        except WrongEpoch as error:  # it moved since it was asked for
            self._refuse(Unavailable(error.message))
        except PenstockError as error:
            self._refuse(error)
        except Exception:
            self._refuse(PenstockError("internal error"))
            raise
        else:
            self._opening, self._subscription = None, found
            found.blocked = self._blocked
            self.send(FrameType.ACK, self.number, pack(found.opened))  # before all else on it

    def _refuse(self, error: PenstockError) -> None:
        self._opening = None
        self._fail(error)

    @property
    def opened(self) -> bool:
        return self._subscription is not None

    @property
    def blocked(self) -> bool:
        return self._blocked

    @blocked.setter
    def blocked(self, blocked: bool) -> None:
        self._blocked = blocked
        if self._subscription is not None:
            self._subscription.blocked = blocked

    def grant(self, grant: Grant) -> None:
        if self._subscription is None:
            raise InvalidArgument("the subscription is not open yet", field="sequence")
        if grant.position:
            self._subscription.acknowledge(grant.position)
        self._subscription.grant(grant.entries, grant.bytes)

    def close(self) -> None:
        self.open = False
        if self._opening is not None:  # it would take the cursor from who has come since
            self._opening.cancel()
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None

    # --- what the hub says ---

    def _on_changes(self, changes: Changes, body: Buffer, urgency: int | None) -> None:
        if self.open:
            flags = FrameFlag.BATCHED | flags_of_class(urgency)
            self.send(FrameType.BATCH, self.number, pack(changes), body, flags=flags)

    def _fail(self, error: PenstockError) -> None:
        if self.open:
            self.end(error)


class LogRelay:
    """A log stream, or a subscription, of a partition that another node serves: passed on, frame by
    frame.

    What comes from the other node and does not fit the reader's connection waits in this node, so
    the other one may send a part of the reader's window only (`bytes_lent`). It gets that part back
    as frames are passed on, while the reader's connection takes them. A reader that does not read
    costs this node that part. How the stream ends is passed on as well, but not what the other node
    says of itself: that a reader should go elsewhere is not true of this one.

    Invariant: what was granted again is no more than has arrived, and than the reader has given
    back beside what is not lent. By the second no more than the reader's window is ever under way
    to it, by the first no more than `bytes_lent` to this node."""

    def __init__(
        self,
        peer: PeerPort,
        control: OpenLog | OpenSubscription,
        *,
        number: int,
        bytes_lent: int,
        send: Callable[..., None],
        end: Callable[[PenstockError | None], None],
    ) -> None:
        self._peer, self._send, self._end = peer, send, end
        self._reader = number  # of the stream on which the reader has it
        self.opened = False  # the request is answered
        self._changes = isinstance(control, OpenSubscription)
        self.bytes_lent = min(bytes_lent, control.credit_bytes)
        self._credit = Credit(entries=control.credit_entries, bytes=control.credit_bytes)
        self._entries_granted = self._bytes_granted = 0  # to the other node, since the beginning
        # A batch that exceeds what is lent comes when nothing else is out; a delta does anyway.
        self._bytes_least = self.bytes_lent // 4 if self._changes else 0
        self.blocked = False  # the reader's connection takes no more for now
        self.open = True
        lent = msgspec.structs.replace(control, credit_bytes=self.bytes_lent)
        self._number = peer.open(lent, self)

    def grant(self, grant: Grant) -> None:
        self._credit.give_back(grant.entries, grant.bytes)
        if grant.position:  # a cursor moves, however full the connection is
            self._peer.send(FrameType.ACK, self._number, pack(Grant(0, 0, grant.position)))
        self.grant_due()

    def close(self) -> None:
        if self.open:
            self.open = False
            self._peer.close_stream(self._number)

    def grant_due(self) -> None:
        if self.blocked or not self.open:
            return
        credit = self._credit
        kept = credit.bytes_window - self.bytes_lent
        entries = credit.entries_received - self._entries_granted
        bytes_ = min(credit.bytes_sent, credit.bytes_received + kept) - self._bytes_granted
        if entries or bytes_ > self._bytes_least:
            self._entries_granted += entries
            self._bytes_granted += bytes_
            self._peer.send(FrameType.ACK, self._number, pack(Grant(entries, bytes_)))

    # --- what the other node says ---

    def on_answer(self, payload: Buffer) -> None:
        if self.open:
            self.opened = True
            self._send(FrameType.ACK, self._reader, payload)

    def on_batch(self, payload: memoryview) -> None:
        if not self.open:
            return
        flags = int(FrameFlag.BATCHED)
        if self._changes:
            changes, body = unpack(payload, Changes)
            flags |= flags_of_class(most_urgent(body, changes.count))
            entries = changes.count
        else:
            piece, body = unpack(payload, LogSlice)
            entries = piece.last - piece.first + 1
        self._credit.use(entries, len(body))
        self._send(FrameType.BATCH, self._reader, payload, flags=flags)
        self.grant_due()

    def on_end(self, error: PenstockError | None) -> None:
        if self.open:
            self.open = False
            if error is not None and (
                isinstance(error, WrongEpoch) or error.details.get("elsewhere")
            ):
                error = Unavailable(error.message)  # the rest is true of the other node alone
            self._end(error)


Opening = OpenLease | OpenLog | OpenSubscription | OpenFollow | OpenSupply
Stream = ConsumerStream | ReaderStream | LiveStream | LogRelay | Demand


class StreamTable:
    def __init__(self, engine: Engine, send: Send, account: Account, *, name: str) -> None:
        self._engine, self.send, self._name = engine, send, name
        self._outlet = Outlet(engine.pace, account, self._pump_logs)
        self._streams: dict[int, tuple[ServedTopic, Stream]] = {}
        self._follows: dict[int, FollowOutput] = {}  # logs that another node reads
        self.blocked = False  # the connection's send buffer is full

    def open(self, number: int, control: Opening, key_id: str | None) -> None:
        self._check_number(number)
        if isinstance(control, OpenLease):
            self._open_lease(number, control, key_id)
        elif isinstance(control, OpenSubscription):
            self._open_subscription(number, control)
        elif isinstance(control, OpenLog):
            self._open_log(number, control)
        elif isinstance(control, OpenSupply):
            self._open_supply(number, control)
        else:
            self._follows[number] = self._engine.nodes.transport.on_open(self, number, control)

    def _check_number(self, number: int) -> None:
        limit = self._engine.config.limits.streams_max
        if number in self._streams or number in self._follows:
            raise InvalidArgument("the stream number is taken", field="sequence")
        # What other nodes pop from here is not counted.
        if sum(not isinstance(stream, Demand) for _, stream in self._streams.values()) >= limit:
            raise LimitExceeded(f"a connection has at most {limit} streams", limit=limit)

    @property
    def any(self) -> bool:
        return bool(self._streams or self._follows)

    def _add(self, number: int, topic: ServedTopic, stream: Stream) -> None:
        stream.blocked = self.blocked
        self._streams[number] = (topic, stream)

    def block(self, blocked: bool) -> None:
        self.blocked = blocked
        for topic, stream in self._streams.values():
            stream.blocked = blocked
            topic.wake()
            if isinstance(stream, LogRelay):
                stream.grant_due()
        if not blocked:
            for sending in list(self._follows.values()):
                self._engine.nodes.transport.on_writable(sending)

    def _pump_logs(self) -> None:
        for _, stream in list(self._streams.values()):
            if isinstance(stream, ReaderStream):
                stream.pump()

    def close(self, number: int) -> None:
        found = self._streams.pop(number, None)
        if found is not None:
            _remove(*found)
        sending = self._follows.pop(number, None)
        if sending is not None:
            self._engine.nodes.transport.on_closed(sending)

    def close_all(self) -> None:
        self._outlet.end()
        for number in [*self._streams, *self._follows]:
            self.close(number)

    def drop_topic(self, topic: ServedTopic) -> None:
        for number, (owner, _) in list(self._streams.items()):
            if owner is topic:
                self.end(number, NotFound(f"topic {topic.config.name} was deleted"))

    def end_unreached(self, error: PenstockError) -> None:
        """End the streams on which nothing can come now. A relay ends with its connection."""
        for number, (topic, stream) in list(self._streams.items()):
            if isinstance(stream, LogRelay | Demand):
                continue
            if not topic.reached(None if isinstance(stream, ConsumerStream) else stream.partition):
                self.end(number, error)

    def end(self, number: int, error: PenstockError | None = None) -> None:
        """Close a stream from this side and say why; without an error: it is complete. If it is not
        open yet, whoever asked for it waits for an answer, and this is it."""
        found = self._streams.get(number)
        if found is None:
            return
        # Most are answered in the step in which they are asked for.
        opened = not isinstance(found[1], LiveStream | LogRelay) or found[1].opened
        self.close(number)
        why = () if error is None else (pack(error.to_wire()),)
        self.send(FrameType.UNSUBSCRIBE if opened else FrameType.NACK, number, *why)

    def on_ack(self, number: int, payload: Buffer) -> None:
        """What a client sends on a stream of its own: credit, or on a supply stream a question."""
        found = self._streams.get(number)
        if found is None:
            return  # the stream ended while this was on its way
        topic, stream = found
        if isinstance(stream, Demand):
            message: Asked
            message, _ = unpack(payload, Asked)  # type: ignore[arg-type]
            stream.on_message(message)
            return
        grant, _ = unpack(payload, Grant)
        try:
            if isinstance(stream, ConsumerStream):
                stream.grant(grant.entries)
            elif isinstance(stream, LogRelay | LiveStream):
                stream.grant(grant)
            else:
                stream.credit.give_back(grant.entries, grant.bytes)
        except InvalidArgument as error:
            self.end(number, error)
            return
        topic.wake()

    def _open_supply(self, number: int, control: OpenSupply) -> None:
        topic = self._engine.queue(control.topic)
        check_id(topic, control.topic_id)
        demand = topic.add_demand(control.consumers, self._sender(number))
        self._add(number, topic, demand)
        self.send(FrameType.ACK, number, pack({}))

    def _open_lease(self, number: int, control: OpenLease, key_id: str | None) -> None:
        topic = self._engine.queue(control.topic)
        _check_lease(control, topic.config)
        self._engine.check_reach(control.topic)
        limit = topic.config.key_streams_max
        if topic.streams_of(key_id) >= limit:
            message = f"topic {control.topic} allows {limit} streams per key"
            raise LimitExceeded(message, limit=limit)
        consumer = f"{self._name}/{number}/{control.consumer}"
        send = self._sender(number)
        stream = ConsumerStream(
            consumer.encode(),
            window=control.credits,
            batch_max=control.batch_max,
            visibility_ms=control.visibility_ms,
            send=lambda delivery, body: send(pack(delivery), body),
            key_id=key_id,
        )
        self._add(number, topic, stream)
        self.send(FrameType.ACK, number, pack({"consumer": consumer}))
        topic.add_stream(stream)

    def _open_log(self, number: int, control: OpenLog) -> None:
        """From a replica of this node, at its commit; if none will do, from the coordinator."""
        topic = self._engine.topics[control.topic]
        check_id(topic, control.topic_id)
        check_window(control.credit_entries, control.credit_bytes)
        source = self._log_source(topic, control)
        if source is None:
            self._relay(number, control, topic)
            return
        start = control.from_sequence or source.sequence_readable + 1
        if start < source.log.sequence_first:
            raise gone(start, sequence_first=source.log.sequence_first)
        stream = self._reader(number, control, source, start)
        self._add(number, topic, stream)
        self.send(FrameType.ACK, number, pack({"from_sequence": start, "topic": topic.config.id}))
        topic.add_log_stream(stream)

    def _log_source(self, topic: ServedTopic, control: OpenLog) -> LogSource | None:
        served = topic.served(topic.partition(control.partition).index)
        self._engine.check_reach(control.topic, control.partition)
        if served is not None:
            return served
        host = self._engine.hosts.get(topic.key(control.partition))
        return host if host is not None and _can_show(host, control) else None

    def _reader(self, number: int, control: OpenLog, source: LogSource, start: int) -> ReaderStream:
        send = self._sender(number)

        def fail(error: BaseException) -> None:
            known = error if isinstance(error, PenstockError) else Unavailable(str(error))
            self.end(number, known)

        return ReaderStream(
            source,
            partition=control.partition,
            cursor=start,
            credit=Credit(entries=control.credit_entries, bytes=control.credit_bytes),
            send=lambda piece, batches: send(pack(piece), *batches),
            fail=fail,
            end=lambda: self.end(number),
            send_room=self._outlet,
            through=control.through or None,
        )

    def _sender(self, number: int) -> Callable[..., None]:
        return partial(self.send, FrameType.BATCH, number, flags=FrameFlag.BATCHED)

    def _open_subscription(self, number: int, control: OpenSubscription) -> None:
        """From this node's hub if it coordinates the partition, else from the one that does."""
        topic = self._engine.topics[control.topic]
        check_id(topic, control.topic_id)
        _check_subscription(control, topic)
        self._engine.check_reach(control.topic, control.partition)
        if topic.served(control.partition) is None:
            if control.forwarded:
                raise topic.not_here(control.partition)
            self._relay(number, msgspec.structs.replace(control, forwarded=True), topic)
            return

        stream = LiveStream(
            number, control.partition, send=self.send, end=lambda error: self.end(number, error)
        )
        self._add(number, topic, stream)
        self._engine.spawn(
            stream.subscribe(self._engine.hub(topic), control), name="open-subscription"
        )

    def _relay(self, number: int, control: OpenLog | OpenSubscription, topic: ServedTopic) -> None:
        node = topic.router.coordinator(topic.key(control.partition))
        peer = topic.router.cluster.live(node) if node else None
        if peer is None:
            raise nobody_serves(topic, control.partition)

        relay = LogRelay(
            peer,
            control,
            number=number,
            bytes_lent=self._relay_share(),
            send=self.send,
            end=lambda error: self.end(number, error),
        )
        self._add(number, topic, relay)

    def _relay_share(self) -> int:
        """What one more relay may have on its way to a reader that does not read."""
        relays = (s for _, s in self._streams.values() if isinstance(s, LogRelay))
        left = RELAYS_BYTES - sum(relay.bytes_lent for relay in relays)
        return max(RELAY_BYTES_MIN, min(RELAY_BYTES_MAX, left // 4))


def _check_lease(control: OpenLease, config: TopicConfig) -> None:
    _check_size("consumer", control.consumer, CONSUMER_BYTES_MAX)
    bounded(control.credits, 1, config.consumer_leases_max, "credits")
    bounded(control.batch_max, 1, BATCH_ENTRIES_MAX, "batch_max")
    if control.visibility_ms is not None:
        bounded(control.visibility_ms, 1, config.visibility_ms_max, "visibility_ms")


def _check_size(field: str, text: str, limit: int) -> None:
    if len(text.encode()) > limit:
        raise InvalidArgument(f"{field} has at most {limit} bytes", field=field, limit=limit)


def _can_show(host: Host, control: OpenLog) -> bool:
    """Whether a replica that does not serve can give what is asked: not what commits *from now on*,
    which it hears of late, and not what it has never had."""
    sound = host.role is Role.FOLLOWING and host.replica.health is LogHealth.SOUND
    return sound and control.from_sequence >= max(1, host.log.sequence_first)


def _remove(topic: ServedTopic, stream: Stream) -> None:
    if isinstance(stream, ConsumerStream):
        topic.remove_stream(stream)
    elif isinstance(stream, LogRelay | LiveStream):
        stream.close()
    elif isinstance(stream, Demand):
        topic.remove_demand(stream)
    else:
        topic.remove_log_stream(stream)


def _check_subscription(control: OpenSubscription, topic: ServedTopic) -> None:
    if topic.config.kind is not TopicKind.DELTA:
        raise FailedPrecondition(f"{control.topic} is no delta topic", topic=control.topic)
    topic.partition(control.partition)
    if control.start not in STARTS:
        raise InvalidArgument(f"start must be one of {', '.join(STARTS)}", field="start")
    if control.start == "cursor" and not control.cursor:
        raise InvalidArgument("start from a cursor needs its name", field="cursor")
    if control.cursor.startswith(SINK_PREFIX):  # a client that moved it would make the sink skip
        raise InvalidArgument(
            f"cursors whose names begin with {SINK_PREFIX} are those of sinks", field="cursor"
        )
    for route in control.routes:
        _check_size("routes", route, ROUTE_BYTES_MAX)
    check_window(control.credit_entries, control.credit_bytes)
    bounded(control.at, 0, _AT_MAX, "at")
    bounded(control.batch_max, 1, BATCH_ENTRIES_MAX, "batch_max")
    bounded(control.batch_ms, 0, BATCH_MS_MAX, "batch_ms")
    bounded(control.coalesce_ms, 0, BATCH_MS_MAX, "coalesce_ms")
