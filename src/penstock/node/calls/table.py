"""Administrative calls: one table from a method's name to its arguments and what it does.

A call takes its arguments by name; if one is called `caller`, that is who calls. The others come
from outside, so they are checked against the types in the function's signature, and unknown ones
are refused. A call that needs a confirmation takes `force` and `confirm` besides; it is not run
without them.

In a call over a whole topic each node does its share, for the partitions that it serves; what a
share takes besides is bound with `partial`. `fan_out` has every partition's share done by its
coordinator; the call then merges the results. A node that does not serve one of the partitions it
was asked for refuses before it does anything, and then those are looked up again; if nobody serves
one for too long, the call fails as a whole, although shares of other nodes may have been done.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar, get_type_hints

import msgspec

from penstock.errors import InvalidArgument, NotFound, PenstockError, Unauthenticated, Unavailable
from penstock.model.topic import TopicConfig
from penstock.node.calls.pages import page_of
from penstock.node.door.confirmations import Deed
from penstock.node.engine import Engine
from penstock.node.observe import logs
from penstock.node.route import WAIT_S, not_there
from penstock.node.serve.partition import Partition
from penstock.node.serve.topic import ServedTopic, check_id
from penstock.wire.frame import FrameType
from penstock.wire.messages import CALLS, Call, CallTraits, Text, pack, traits_of

CLUSTER_KEY_ID: Final = "cluster"  # what a node that has shown the cluster's key is called
Result = dict[str, Any]
Function = TypeVar("Function", bound=Callable[..., Awaitable[Result]])
CONFIRMATION: Final = (("force", bool, False), ("confirm", str, ""))


class Caller(NamedTuple):
    key_id: str | None
    connection: int
    peer: bool = False  # another node of the cluster
    gone: Callable[[], bool] = lambda: False  # whether nobody is left to be answered

    @property
    def name(self) -> str:
        """Whom a confirmation token belongs to: a key, or where none is shown the connection."""
        return f"key {self.key_id}" if self.key_id else f"connection {self.connection}"


class Method(NamedTuple):
    run: Callable[..., Awaitable[Result]]
    arguments: type[Any]
    asks_for_caller: bool
    traits: CallTraits
    subject: str  # the argument that says what the call is about; empty: none does
    of_queues: bool  # its topic must be one of messages that are leased, whatever is confirmed


METHODS: dict[str, Method] = {}


def method(*, subject: str = "topic", of_queues: bool = False) -> Callable[[Function], Function]:
    """Register a call under its function's name, by which the protocol's table knows it."""

    def register(run: Function) -> Function:
        traits = CALLS[run.__name__]
        arguments = arguments_of(run, *(CONFIRMATION if traits.confirmed else ()))
        about = subject if subject in arguments.__struct_fields__ else ""
        asks = "caller" in run.__annotations__
        METHODS[run.__name__] = Method(run, arguments, asks, traits, about, of_queues)
        return run

    return register


def arguments_of(run: Callable[..., Any], *besides: tuple[str, type, Any]) -> type[Any]:
    """What a function takes by name, as a type that arguments from outside are converted to."""
    types = get_type_hints(run, include_extras=True)
    fields: list[Any] = [
        (name, types[name]) if one.default is one.empty else (name, types[name], one.default)
        for name, one in inspect.signature(run).parameters.items()
        if one.kind is one.KEYWORD_ONLY and name != "caller"
    ]
    fields += besides
    return msgspec.defstruct(run.__name__, fields, kw_only=True, forbid_unknown_fields=True)


def parse(type_: type[Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments as their type says that they are, or a refusal that names the wrong one."""
    try:
        return msgspec.structs.asdict(msgspec.convert(arguments, type_))
    except msgspec.ValidationError as error:
        path = re.search(r"`\$\.([\w]+)", str(error)) or re.search(r"field `(\w+)`", str(error))
        raise InvalidArgument(str(error), field=path.group(1) if path else "arguments") from error


async def dispatch_call(
    engine: Engine, caller: Caller, name: str, arguments: dict[str, Any]
) -> Result:
    found = METHODS.get(name)
    started = time.perf_counter()
    status = "OK"
    try:
        if found is None:
            raise InvalidArgument(f"no such method: {name}", field="method")
        with logs.request(str(arguments.pop("request_id", "") or "")) as request_id:
            return await _run(engine, caller, found, arguments, request_id=request_id)
    except PenstockError as error:
        status = error.status
        raise
    finally:
        known = name if found is not None else "unknown"
        engine.metrics.requests.add((known, status))
        engine.metrics.request_seconds.observe((known,), time.perf_counter() - started)


async def _run(
    engine: Engine, caller: Caller, found: Method, arguments: dict[str, Any], *, request_id: str
) -> Result:
    given, traits = parse(found.arguments, arguments), found.traits
    if traits.between_nodes and not caller.peer:
        raise Unauthenticated("only a node of the cluster may call this")
    if caller.key_id == CLUSTER_KEY_ID and not traits.between_nodes:
        raise Unauthenticated("this takes an API key, which the cluster's key is not")
    about = given.get(found.subject) or ""
    subject = str(about.get("name", "") if isinstance(about, dict) else about)
    if found.subject in ("topic", "config") and not traits.between_nodes:
        engine.check_reach(subject)
    if found.asks_for_caller:
        given["caller"] = caller
    if not traits.audited:
        return await found.run(engine, **given)
    method, who = found.run.__name__, caller.key_id
    async with engine.audit.act(method, subject=subject, who=who, request_id=request_id):
        if found.of_queues:
            engine.queue(subject)
        if traits.confirmed:
            deed, token = _deed(engine, method, subject), given.pop("confirm")
            engine.confirmations.use(caller.name, token, deed, force=given.pop("force"))
        return await found.run(engine, **given)


# --- topics ---


def _public(config: TopicConfig) -> dict[str, Any]:
    return dict(msgspec.to_builtins(config))


@method(subject="config")
async def topic_create(
    engine: Engine, *, config: dict[str, Any], exists_ok: bool = False
) -> Result:
    if "id" in config:
        raise InvalidArgument("a topic's id is given by the node", field="id")
    return _public(await engine.administration.create_topic(config, exists_ok=exists_ok))


@method()
async def topic_get(engine: Engine, *, topic: str) -> Result:
    return _public(engine.config_of(topic))


@method()
async def topic_list(engine: Engine, *, after: Text = "") -> Result:
    behind = (config for config in engine.configs() if config.name > after)
    return page_of((config.name, _public(config)) for config in behind).told("topics")


@method()
async def topic_update(engine: Engine, *, topic: str, changes: dict[str, Any]) -> Result:
    await engine.administration.update_topic(topic, changes)
    return _public(engine.config_of(topic))


@method()
async def topic_delete(engine: Engine, *, topic: str) -> Result:
    await engine.administration.delete_topic(topic)
    return {}


# --- confirmations and keys ---


def _deed(engine: Engine, method: str, subject: str) -> Deed:
    """What a call would do to a topic, or to a key, that there is."""
    if method != "key_revoke":
        return Deed(method, subject, engine.config_of(subject).id)
    if not engine.keys.known(subject):
        raise NotFound(f"no key {subject}", key_id=subject)
    return Deed(method, subject)


@method()
async def confirm(engine: Engine, *, caller: Caller, method: str, subject: str) -> Result:
    """`subject`: the topic's name or the key's id."""
    if not traits_of(method).confirmed:
        known = ", ".join(name for name, traits in CALLS.items() if traits.confirmed)
        raise InvalidArgument(f"method must be one of {known}", field="method")
    token, expires_ms = engine.confirmations.give(caller.name, _deed(engine, method, subject))
    return {"confirm": token, "expires_ms": expires_ms}


@method(subject="name")
async def key_create(engine: Engine, *, name: str) -> Result:
    made = await engine.keys.create(name)
    return {**made.record.public(), "key": made.text}


@method()
async def key_list(engine: Engine, *, after: Text = "") -> Result:
    named = ((f"{record.created_ms:015}.{record.id}", record) for record in engine.keys.list())
    return page_of((name, record.public()) for name, record in named if name > after).told("keys")


@method(subject="id")
async def key_revoke(engine: Engine, *, id: str) -> Result:
    record = await engine.keys.revoke(id)
    engine.revoke(id)
    return record.public()


class NodeShare(NamedTuple):
    engine: Engine
    topic: ServedTopic
    partitions: list[Partition]  # all of them are served here

    def the_only(self) -> Partition:
        if len(self.partitions) != 1:
            raise InvalidArgument("this is about one partition", field="partitions", limit=1)
        return self.partitions[0]

    async def all_committed(self) -> None:
        """Wait until all that was seen is committed: nothing is shown that could still be lost."""
        self.topic.wake()
        await asyncio.gather(*(p.committed(p.log.sequence_last) for p in self.partitions))


Run = Callable[[NodeShare], Awaitable[Result]]


class Registered(NamedTuple):
    run: Callable[..., Awaitable[Result]]
    arguments: type[Any]  # what another node may say
    of_queues: bool  # its topic must be one of messages that are leased


SHARES: Final[dict[str, Registered]] = {}


def shared(*, of_queues: bool = False) -> Callable[[Function], Function]:
    def register(run: Function) -> Function:
        SHARES[run.__name__] = Registered(run, arguments_of(run), of_queues)
        return run

    return register


@method()
async def share(
    engine: Engine,
    *,
    topic: str,
    of: str,
    partitions: list[int],
    arguments: dict[str, Any],
    topic_id: int = 0,
) -> Result:
    """Another node, which takes the topic to have this id, asks for our share of a call."""
    found = SHARES.get(of)
    if found is None:
        raise InvalidArgument(f"nobody has a share in {of}", field="of")
    given = parse(found.arguments, arguments)
    served = engine.queue(topic) if found.of_queues else engine.topics[topic]
    check_id(served, topic_id)
    here = [served.here(index) for index in sorted(set(partitions))]
    return await found.run(NodeShare(engine, served, here), **given)


async def fan_out(
    engine: Engine, topic: ServedTopic, run: Run, *, indices: Iterable[int] | None = None
) -> list[Result]:
    """The share of every partition (or of those named), done by whoever serves it, at once."""
    if indices is None and len(topic.local) == len(topic.partitions):
        return [await run(NodeShare(engine, topic, list(topic.local)))]
    loop = asyncio.get_running_loop()
    deadline = loop.time() + WAIT_S
    left = set(range(len(topic.partitions)) if indices is None else indices)
    results: list[Result] = []
    while left:
        groups = by_node(topic, sorted(left))
        asked = (_done(engine, topic, run, *group) for group in groups.items())
        for done, result in zip(groups.values(), await asyncio.gather(*asked), strict=True):
            if result is not None:
                results.append(result)
                left.difference_update(done)
        if left:
            if loop.time() >= deadline:
                raise nobody_serves(topic, min(left))
            await topic.router.changed(topic.key(min(left)))
    return results


async def _done(
    engine: Engine, topic: ServedTopic, run: Run, node: str, indices: list[int]
) -> Result | None:
    """The share of one node; None: it does not serve these partitions after all."""
    try:
        if node:
            return await ask_share(topic, node, run, indices)
        return await run(NodeShare(engine, topic, [topic.here(index) for index in indices]))
    except PenstockError as error:
        if not_there(error) or error.details.get("sent") is False:
            return None
        raise


def by_node(topic: ServedTopic, indices: Iterable[int]) -> dict[str, list[int]]:
    """By the node that serves them, empty for this one. What nobody serves is left out."""
    groups: dict[str, list[int]] = {}
    for index in indices:
        if topic.served(index) is not None:
            groups.setdefault("", []).append(index)
        elif node := topic.router.coordinator(topic.key(index)):
            groups.setdefault(node, []).append(index)
    return groups


async def ask_share(topic: ServedTopic, node: str, run: Run, indices: Iterable[int] = ()) -> Result:
    peer = topic.router.cluster.live(node)
    if peer is None:
        raise Unavailable(f"node {node} is not connected", sent=False)
    of, bound = (run.func, run.keywords) if isinstance(run, partial) else (run, {})
    call = Call(
        "share",
        {"topic": topic.config.name, "of": of.__name__, "partitions": list(indices),
         "arguments": msgspec.to_builtins(bound), "topic_id": topic.config.id},
    )  # fmt: skip
    result: Result = await peer.ask(FrameType.SUBSCRIBE, dict, pack(call))
    return result


def nobody_serves(topic: ServedTopic, index: int) -> Unavailable:
    return Unavailable(
        f"nobody serves partition {index} of {topic.config.name} at the moment", partition=index
    )


def merged(results: Iterable[Result], field: str) -> list[Any]:
    rows = [row for result in results for row in result[field]]
    return sorted(rows, key=lambda row: row["partition"])
