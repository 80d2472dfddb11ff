"""Administrative calls: one table from a method's name to its arguments and what it does."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec

from penstock.errors import InvalidArgument, NotFound, PenstockError, Unauthenticated
from penstock.node import logs
from penstock.node.confirmations import NEED_CONFIRMATION
from penstock.node.engine import Engine
from penstock.node.topic import Topic


class Caller(NamedTuple):
    """Who calls: the API key's id, if any, and the connection."""

    key_id: str | None
    connection: int
    peer: bool = False  # another node of the cluster


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a method takes. Unknown fields are refused."""


class TopicArguments(Arguments, frozen=True):
    topic: str


class DestructiveArguments(TopicArguments, frozen=True):
    force: bool = False
    confirm: str = ""


class Method(NamedTuple):
    arguments: type[Any]
    run: Callable[[Engine, Caller, Any], Awaitable[dict[str, Any]]]
    audited: bool
    between_nodes: bool  # only another node of the cluster may call it, about what is here
    subject: Callable[[Any], str]


METHODS: dict[str, Method] = {}


def method(
    arguments: type[Arguments],
    *,
    audited: bool = False,
    between_nodes: bool = False,
    subject: str = "topic",
) -> Callable[[Any], Any]:
    """Register a call under its function's name."""

    def register(run: Any) -> Any:
        METHODS[run.__name__] = Method(
            arguments, run, audited, between_nodes, lambda a: str(getattr(a, subject, "") or "")
        )
        return run

    return register


async def dispatch_call(
    engine: Engine, caller: Caller, name: str, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Check the arguments, make the call, and leave a trace of administrative ones."""
    found = METHODS.get(name)
    started = time.perf_counter()
    status = "OK"
    try:
        if found is None:
            raise InvalidArgument(f"no such method: {name}", field="method")
        with logs.request(str(arguments.pop("request_id", "") or "")) as request_id:
            parsed = parse(found.arguments, arguments)
            if found.between_nodes and not caller.peer:
                raise Unauthenticated("only a node of the cluster may call this")
            if hasattr(parsed, "topic") and not found.between_nodes:
                engine.check_reach(parsed.topic or "")
            if not found.audited:
                return await found.run(engine, caller, parsed)
            async with engine.audit.act(
                name, subject=found.subject(parsed), who=caller.key_id, request_id=request_id
            ):
                return await found.run(engine, caller, parsed)
    except PenstockError as error:
        status = error.status
        raise
    finally:
        known = name if found is not None else "unknown"
        engine.metrics.requested(known, status, time.perf_counter() - started)


def parse(type_: type[Any], arguments: dict[str, Any]) -> Any:
    """The arguments as their type says that they are, or a refusal that names the wrong one."""
    try:
        return msgspec.convert(arguments, type_)
    except msgspec.ValidationError as error:
        path = re.search(r"`\$\.([\w]+)", str(error)) or re.search(r"field `(\w+)`", str(error))
        raise InvalidArgument(str(error), field=path.group(1) if path else "arguments") from error


# --- topics ---


class TopicCreateArguments(Arguments, frozen=True):
    config: dict[str, Any]
    exists_ok: bool = False

    @property
    def topic(self) -> Any:
        return self.config.get("name")


class TopicUpdateArguments(TopicArguments, frozen=True):
    changes: dict[str, Any]


def _public(topic: Topic) -> dict[str, Any]:
    return dict(msgspec.to_builtins(topic.config))


@method(TopicCreateArguments, audited=True)
async def topic_create(engine: Engine, _: Caller, a: TopicCreateArguments) -> dict[str, Any]:
    if "id" in a.config:
        raise InvalidArgument("a topic's id is given by the node", field="id")
    config = await engine.create_topic(a.config, exists_ok=a.exists_ok)
    return dict(msgspec.to_builtins(config))


@method(TopicArguments)
async def topic_get(engine: Engine, _: Caller, a: TopicArguments) -> dict[str, Any]:
    return _public(engine.topic(a.topic))


@method(Arguments)
async def topic_list(engine: Engine, _: Caller, a: Arguments) -> dict[str, Any]:
    return {"topics": [_public(engine.topics[name]) for name in sorted(engine.topics)]}


@method(TopicUpdateArguments, audited=True)
async def topic_update(engine: Engine, _: Caller, a: TopicUpdateArguments) -> dict[str, Any]:
    await engine.update_topic(a.topic, a.changes)
    return _public(engine.topic(a.topic))


@method(DestructiveArguments, audited=True)
async def topic_delete(engine: Engine, _: Caller, a: DestructiveArguments) -> dict[str, Any]:
    engine.topic(a.topic)
    engine.confirmations.use(a.confirm, "topic_delete", a.topic, force=a.force)
    await engine.delete_topic(a.topic)
    return {}


# --- confirmations and keys ---


class ConfirmArguments(Arguments, frozen=True):
    method: str
    subject: str  # the topic's name or the key's id


class KeyCreateArguments(Arguments, frozen=True):
    name: str


class KeyRevokeArguments(Arguments, frozen=True):
    id: str
    force: bool = False
    confirm: str = ""


@method(ConfirmArguments)
async def confirm(engine: Engine, _: Caller, a: ConfirmArguments) -> dict[str, Any]:
    if a.method not in NEED_CONFIRMATION:
        raise InvalidArgument(
            f"method must be one of {', '.join(NEED_CONFIRMATION)}", field="method"
        )
    token, expires_ms = engine.confirmations.give(a.method, a.subject)
    return {"confirm": token, "expires_ms": expires_ms}


@method(KeyCreateArguments, audited=True, subject="name")
async def key_create(engine: Engine, _: Caller, a: KeyCreateArguments) -> dict[str, Any]:
    made = await engine.keys.create(a.name)
    return {**made.record.public(), "key": made.text}


@method(Arguments)
async def key_list(engine: Engine, _: Caller, a: Arguments) -> dict[str, Any]:
    return {"keys": [record.public() for record in engine.keys.list()]}


@method(KeyRevokeArguments, audited=True, subject="id")
async def key_revoke(engine: Engine, _: Caller, a: KeyRevokeArguments) -> dict[str, Any]:
    if all(record.id != a.id for record in engine.keys.list()):
        raise NotFound(f"no key {a.id}", key_id=a.id)
    engine.confirmations.use(a.confirm, "key_revoke", a.id, force=a.force)
    record = await engine.keys.revoke(a.id)
    for connection in list(engine.connections):
        connection.revoke(a.id)
    return record.public()
