"""The SDK without async: the same client, on a loop in a thread of its own.

    with penstock.sync.connect() as client:
        jobs = client.topic("jobs", of=dict)
        jobs.put({"resize": "cat.png"}, priority=5)
        for message in jobs.consume():
            with message:
                print(message.value)

Every method here runs its async twin on that loop and waits for it. Nothing is implemented twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager
from inspect import iscoroutinefunction
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

from penstock import connect as connect_async
from penstock.client import client, topic
from penstock.client.bridge import ThreadBridge
from penstock.client.delta import deltas, subscription
from penstock.client.network.endpoints import Tls
from penstock.client.options import Options
from penstock.client.queue import leases, messages
from penstock.model.batch import Batch
from penstock.model.topic import TopicConfig

A = TypeVar("A")
T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


class Twin(Generic[A]):
    """An object whose async original lives on the bridge's loop."""

    def __init__(self, bridge: ThreadBridge, original: A) -> None:
        self._bridge, self._original = bridge, original

    def __getattr__(self, name: str) -> Any:
        """What needs no waiting (a message's id, a batch's columns, …) is read directly."""
        found = getattr(self._original, name)
        if iscoroutinefunction(found):
            raise AttributeError(f"{type(self).__name__} has no {name}")
        return found


def blocking(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Twin[A], P], R]:
    """The twin of an async method: same arguments, same result, but it waits."""

    def wait(self: Twin[A], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._bridge.run(method(self._original, *args, **kwargs))

    wait.__doc__, wait.__name__ = method.__doc__, method.__name__
    return wait


class LeasedMessage(Twin[leases.LeasedMessage[T]], Generic[T]):
    """`with message:` acknowledges it at the end, or gives it back on an error."""

    value: T
    _span: AbstractContextManager[Any]
    ack = blocking(leases.LeasedMessage.ack)
    nack = blocking(leases.LeasedMessage.nack)
    reject = blocking(leases.LeasedMessage.reject)
    extend = blocking(leases.LeasedMessage.extend)
    give_back = blocking(leases.LeasedMessage.give_back)

    def __enter__(self) -> Self:
        self._bridge.do(self._original.begin)
        self._span = self._original.trace()
        self._span.__enter__()
        return self

    def __exit__(self, *exited: Any) -> None:
        try:
            self._bridge.run(self._original.finish(exited[1]))
        finally:
            self._span.__exit__(*exited)

    def __repr__(self) -> str:
        return repr(self._original)


class MessageBatch(Twin[leases.MessageBatch[T]], Generic[T]):
    payloads: list[bytes]
    values: list[T]
    ack = blocking(leases.MessageBatch.ack)
    nack = blocking(leases.MessageBatch.nack)
    reject = blocking(leases.MessageBatch.reject)
    give_back = blocking(leases.MessageBatch.give_back)

    def __len__(self) -> int:
        return len(self._original)

    def __getitem__(self, index: int) -> LeasedMessage[T]:
        return LeasedMessage(self._bridge, self._original[index])

    def __iter__(self) -> Iterator[LeasedMessage[T]]:
        return (LeasedMessage(self._bridge, message) for message in self._original)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exited: Any) -> None:
        self._bridge.run(self._original.__aexit__(*exited))


class Consumer(Twin[topic.Consumer[T, Any]], Generic[T, R]):
    """Iterate over it; leave the loop or its `with` to stop."""

    close = blocking(topic.Consumer.aclose)

    def __init__(
        self,
        bridge: ThreadBridge,
        original: topic.Consumer[T, Any],
        wrap: Callable[[ThreadBridge, Any], R],
    ) -> None:
        super().__init__(bridge, original)
        self._wrap = wrap

    def __iter__(self) -> Iterator[R]:
        for unit in self._bridge.iterate(self._original.__aiter__()):
            yield self._wrap(self._bridge, unit)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exited: object) -> None:
        self.close()


class DeadLetters(Twin[messages.DeadLetters[T]], Generic[T]):
    peek = blocking(messages.DeadLetters.peek)
    list = blocking(messages.DeadLetters.list)
    replay = blocking(messages.DeadLetters.replay)
    delete = blocking(messages.DeadLetters.delete)

    def __iter__(self) -> Iterator[Any]:
        return self._bridge.iterate(self._original.__aiter__())


class LogReader(Twin[messages.LogReader[T]], Generic[T]):
    def __iter__(self) -> Iterator[Any]:
        return self._bridge.iterate(self._original.__aiter__())

    def batches(self) -> Iterator[Batch]:
        return self._bridge.iterate(self._original.batches())


class Topic(Twin[topic.Topic[T]], Generic[T]):
    name: str
    config: TopicConfig
    open = blocking(topic.Topic.opened)
    put = blocking(topic.Topic.put)
    put_many = blocking(topic.Topic.put_many)
    peek = blocking(topic.Topic.peek)
    stats = blocking(topic.Topic.stats)
    update = blocking(topic.Topic.update)
    pause = blocking(topic.Topic.pause)
    resume = blocking(topic.Topic.resume)
    move_to_dlq = blocking(topic.Topic.move_to_dlq)
    purge = blocking(topic.Topic.purge)
    delete = blocking(topic.Topic.delete)

    @property
    def dlq(self) -> DeadLetters[T]:
        return DeadLetters(self._bridge, self._original.dlq)

    def pop(self, *args: Any, **kwargs: Any) -> list[LeasedMessage[T]]:
        found = self._bridge.run(self._original.pop(*args, **kwargs))
        return [LeasedMessage(self._bridge, message) for message in found]

    def consume(self, **kwargs: Any) -> Consumer[T, LeasedMessage[T]]:
        made = self._bridge.do(lambda: self._original.consume(**kwargs))
        return Consumer(self._bridge, made, LeasedMessage)

    def consume_batches(self, *args: Any, **kwargs: Any) -> Consumer[T, MessageBatch[T]]:
        made = self._bridge.do(lambda: self._original.consume_batches(*args, **kwargs))
        return Consumer(self._bridge, made, MessageBatch)

    def log(self, *args: Any, **kwargs: Any) -> LogReader[T]:
        return LogReader(self._bridge, self._original.log(*args, **kwargs))


class ReleasedBatch(Twin[subscription.ReleasedBatch]):
    """Deltas of one partition, in columns."""

    def ack(self) -> None:
        """All of it is handled, and all that came before."""
        self._bridge.do(self._original.ack)

    def __len__(self) -> int:
        return len(self._original)

    def __getitem__(self, index: int) -> subscription.Released:
        return self._original[index]

    def __iter__(self) -> Iterator[subscription.Released]:
        return iter(self._original)


class Deltas(Twin[deltas.Deltas]):
    """The vectors of a delta topic."""

    name: str
    origin: str
    dimensions: int
    create = blocking(deltas.Deltas.create)
    replace = blocking(deltas.Deltas.replace)
    set = blocking(deltas.Deltas.set)
    scale = blocking(deltas.Deltas.scale)
    offset = blocking(deltas.Deltas.offset)
    delete = blocking(deltas.Deltas.delete)
    set_metadata = blocking(deltas.Deltas.set_metadata)
    change = blocking(deltas.Deltas.change)
    put = blocking(deltas.Deltas.put)
    put_many = blocking(deltas.Deltas.put_many)
    put_columns = blocking(deltas.Deltas.put_columns)
    get = blocking(deltas.Deltas.get)
    history = blocking(deltas.Deltas.history)

    def subscribe(self, **kwargs: Any) -> Iterator[subscription.Released]:
        """Deltas in causal order; it goes on for ever, so leave the loop when it is enough."""
        return self._bridge.iterate(self._original.subscribe(**kwargs))

    def subscribe_batches(self, **kwargs: Any) -> Iterator[ReleasedBatch]:
        """The same in columns."""
        for batch in self._bridge.iterate(self._original.subscribe_batches(**kwargs)):
            yield ReleasedBatch(self._bridge, batch)


class Client(Twin[client.Client]):
    """Use it as a context manager; leaving it drains what is under way."""

    topics = blocking(client.Client.topics)
    stats = blocking(client.Client.stats)
    call = blocking(client.Client.call)

    def __init__(self, make: Callable[[], client.Client]) -> None:
        bridge = ThreadBridge()
        try:
            super().__init__(bridge, bridge.do(make))
        except BaseException:
            bridge.close()
            raise

    @overload
    def topic(self, name: str, of: type[T], **kwargs: Any) -> Topic[T]: ...
    @overload
    def topic(self, name: str, of: Any = bytes, **kwargs: Any) -> Topic[Any]: ...
    def topic(self, name: str, of: Any = bytes, **kwargs: Any) -> Topic[Any]:
        """A topic, opened: it exists when this returns."""
        made = self._bridge.do(lambda: self._original.topic(name, of, **kwargs))
        return Topic(self._bridge, self._bridge.run(made.opened()))

    def deltas(self, topic: str, **kwargs: Any) -> Deltas:
        """The vectors of a delta topic, opened: it exists when this returns."""
        made = self._bridge.do(lambda: self._original.deltas(topic, **kwargs))
        return Deltas(self._bridge, self._bridge.run(made.opened()))

    def __enter__(self) -> Self:
        try:
            self._bridge.run(self._original.__aenter__())
        except BaseException:
            self._bridge.close()
            raise
        return self

    def __exit__(self, *exited: object) -> None:
        try:
            self._bridge.run(self._original.close())
        finally:
            self._bridge.close()


def connect(
    url: str | os.PathLike[str] | Sequence[str] | None = None,
    api_key: str | None = None,
    tls: Tls = None,
    *,
    options: Options | None = None,
) -> Client:
    """As `penstock.connect`, for `with`."""
    return Client(lambda: connect_async(url, api_key, tls, options=options))
