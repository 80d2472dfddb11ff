"""A session's end of live subscriptions: what a client may ask for, and the frames it gets.

The hub of the topic decides what is sent and when. A subscription may have to wait until the hub
knows what the log has released so far; the stream is there from the request on, so that the client
can end it meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from penstock.errors import (
    FailedPrecondition,
    InvalidArgument,
    PenstockError,
    Unavailable,
    WrongEpoch,
)
from penstock.model.columns import Buffer
from penstock.model.delivery import most_urgent
from penstock.model.entries import BATCH_ENTRIES_MAX
from penstock.model.topic import TopicKind
from penstock.node.live.cursors import SINK_PREFIX
from penstock.node.live.hub import Hub
from penstock.node.live.subscription import Subscription
from penstock.node.serve.streams import WINDOW_BYTES_MAX, WINDOW_ENTRIES_MAX
from penstock.node.serve.topic import Topic
from penstock.wire.frame import FrameFlag, FrameType, flags_of_class
from penstock.wire.limits import BATCH_MS_MAX, CURSOR_BYTES_MAX, ROUTE_BYTES_MAX, ROUTES_MAX
from penstock.wire.messages import Changes, Grant, OpenSubscription, pack

STARTS: Final = ("now", "sequence", "time", "cursor")
_AT_MAX: Final = (1 << 63) - 1


class LiveStream:
    """One subscription of a session."""

    def __init__(
        self,
        partition: int,
        send: Callable[..., None],  # (type, *payload, flags=)
        *,
        end: Callable[[PenstockError], None],
    ) -> None:
        self.partition = partition
        self._send, self._end = send, end
        self._opening: asyncio.Task[None] | None = None  # while the hub is asked
        self._subscription: Subscription | None = None
        self._blocked = False
        self.open = True

    async def subscribe(self, hub: Hub, control: OpenSubscription) -> None:
        """Have a topic's hub take the request; answer it."""
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
            self._accept(found)

    def _accept(self, found: Subscription) -> None:
        self._opening, self._subscription = None, found
        found.blocked = self._blocked
        self._send(FrameType.ACK, pack(found.opened))  # nothing is sent on it before

    def _refuse(self, error: PenstockError) -> None:
        self._opening = None
        self._fail(error)

    @property
    def opened(self) -> bool:
        """Whether the request is answered."""
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

    def _on_changes(self, changes: Changes, body: Buffer) -> None:
        if self.open:
            flags = FrameFlag.BATCHED | flags_of_class(most_urgent(body, changes.count))
            self._send(FrameType.BATCH, pack(changes), body, flags=flags)

    def _fail(self, error: PenstockError) -> None:
        if self.open:
            self._end(error)


def check_subscription(control: OpenSubscription, topic: Topic) -> None:
    """Raise unless a client may ask for this."""
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
    if len(control.routes) > ROUTES_MAX:
        raise InvalidArgument(f"at most {ROUTES_MAX} routes", field="routes", limit=ROUTES_MAX)
    sizes: list[tuple[str, Any, int]] = [("cursor", control.cursor, CURSOR_BYTES_MAX)]
    sizes += [("routes", route, ROUTE_BYTES_MAX) for route in control.routes]
    for field, text, limit in sizes:
        if len(text.encode()) > limit:
            raise InvalidArgument(f"{field} has at most {limit} bytes", field=field, limit=limit)
    for field, value, least, limit in (
        ("at", control.at, 0, _AT_MAX),
        ("credit_entries", control.credit_entries, 1, WINDOW_ENTRIES_MAX),
        ("credit_bytes", control.credit_bytes, 1, WINDOW_BYTES_MAX),
        ("batch_max", control.batch_max, 1, BATCH_ENTRIES_MAX),
        ("batch_ms", control.batch_ms, 0, BATCH_MS_MAX),
        ("coalesce_ms", control.coalesce_ms, 0, BATCH_MS_MAX),
    ):
        if not least <= value <= limit:
            raise InvalidArgument(
                f"{field} must be from {least} to {limit}", field=field, limit=limit
            )
