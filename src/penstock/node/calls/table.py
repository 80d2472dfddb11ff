"""Administrative calls: one table from a method's name to its arguments and what it does."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

import msgspec

from penstock.errors import InvalidArgument, NotFound, PenstockError, Unauthenticated
from penstock.model.topic import TopicConfig
from penstock.node.calls.pages import page_of
from penstock.node.door.confirmations import Deed
from penstock.node.engine import Engine
from penstock.node.observe import logs
from penstock.wire.calls import CALLS, CallTraits, traits_of
from penstock.wire.limits import Text

CLUSTER_KEY_ID: Final = "cluster"  # what a node that has shown the cluster's key is called


Result = dict[str, Any]


class Caller(NamedTuple):
    """Who calls: the API key's id, if any, and the connection."""

    key_id: str | None
    connection: int
    peer: bool = False  # another node of the cluster
    gone: Callable[[], bool] = lambda: False  # whether nobody is left to be answered

    @property
    def name(self) -> str:
        """Whom a confirmation token belongs to: a key, or where none is shown the connection."""
        return f"key {self.key_id}" if self.key_id else f"connection {self.connection}"


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a method takes. Unknown fields are refused."""


class TopicArguments(Arguments, frozen=True):
    topic: str


class PageArguments(Arguments, frozen=True):
    after: Text = ""  # `next` of the page before


class DestructiveArguments(TopicArguments, frozen=True):
    force: bool = False
    confirm: str = ""


class Method(NamedTuple):
    arguments: type[Any]
    run: Callable[[Engine, Caller, Any], Awaitable[Result]]
    traits: CallTraits
    subject: str  # the argument that says what an audited call is about


METHODS: dict[str, Method] = {}


def method(arguments: type[Arguments], *, subject: str = "topic") -> Callable[[Any], Any]:
    """Register a call under its function's name, by which the protocol's table knows it."""

    def register(run: Any) -> Any:
        METHODS[run.__name__] = Method(arguments, run, CALLS[run.__name__], subject)
        return run

    return register


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
            parsed = parse(found.arguments, arguments)
            if found.traits.between_nodes and not caller.peer:
                raise Unauthenticated("only a node of the cluster may call this")
            if caller.key_id == CLUSTER_KEY_ID and not found.traits.between_nodes:
                raise Unauthenticated("this takes an API key, which the cluster's key is not")
            if hasattr(parsed, "topic") and not found.traits.between_nodes:
                engine.check_reach(parsed.topic or "")
            if not found.traits.audited:
                return await found.run(engine, caller, parsed)
            subject = str(getattr(parsed, found.subject, "") or "")
            async with engine.audit.act(
                name, subject=subject, who=caller.key_id, request_id=request_id
            ):
                return await found.run(engine, caller, parsed)
    except PenstockError as error:
        status = error.status
        raise
    finally:
        known = name if found is not None else "unknown"
        engine.metrics.requests.add((known, status))
        engine.metrics.request_seconds.observe((known,), time.perf_counter() - started)


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


def _public(config: TopicConfig) -> dict[str, Any]:
    return dict(msgspec.to_builtins(config))


@method(TopicCreateArguments)
async def topic_create(engine: Engine, _: Caller, a: TopicCreateArguments) -> Result:
    if "id" in a.config:
        raise InvalidArgument("a topic's id is given by the node", field="id")
    return _public(await engine.administration.create_topic(a.config, exists_ok=a.exists_ok))


@method(TopicArguments)
async def topic_get(engine: Engine, _: Caller, a: TopicArguments) -> Result:
    return _public(engine.config_of(a.topic))


@method(PageArguments)
async def topic_list(engine: Engine, _: Caller, a: PageArguments) -> Result:
    behind = (config for config in engine.configs() if config.name > a.after)
    page = page_of((config.name, _public(config)) for config in behind)
    return {"topics": page.rows, "next": page.next}


@method(TopicUpdateArguments)
async def topic_update(engine: Engine, _: Caller, a: TopicUpdateArguments) -> Result:
    await engine.administration.update_topic(a.topic, a.changes)
    return _public(engine.config_of(a.topic))


@method(DestructiveArguments)
async def topic_delete(engine: Engine, caller: Caller, a: DestructiveArguments) -> Result:
    confirmed(engine, caller, "topic_delete", a)
    await engine.administration.delete_topic(a.topic)
    return {}


# --- confirmations and keys ---


def confirmed(engine: Engine, caller: Caller, method: str, a: DestructiveArguments) -> None:
    deed = Deed(method, a.topic, engine.config_of(a.topic).id)
    engine.confirmations.use(caller.name, a.confirm, deed, force=a.force)


def revocation(engine: Engine, key_id: str) -> Deed:
    """The deed of revoking a key that exists."""
    if not engine.keys.known(key_id):
        raise NotFound(f"no key {key_id}", key_id=key_id)
    return Deed("key_revoke", key_id)


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
async def confirm(engine: Engine, caller: Caller, a: ConfirmArguments) -> Result:
    if not traits_of(a.method).confirmed:
        known = ", ".join(name for name, traits in CALLS.items() if traits.confirmed)
        raise InvalidArgument(f"method must be one of {known}", field="method")
    if a.method == "key_revoke":
        deed = revocation(engine, a.subject)
    else:
        deed = Deed(a.method, a.subject, engine.config_of(a.subject).id)
    token, expires_ms = engine.confirmations.give(caller.name, deed)
    return {"confirm": token, "expires_ms": expires_ms}


@method(KeyCreateArguments, subject="name")
async def key_create(engine: Engine, _: Caller, a: KeyCreateArguments) -> Result:
    made = await engine.keys.create(a.name)
    return {**made.record.public(), "key": made.text}


@method(PageArguments)
async def key_list(engine: Engine, _: Caller, a: PageArguments) -> Result:
    named = ((f"{record.created_ms:015}.{record.id}", record) for record in engine.keys.list())
    page = page_of((name, record.public()) for name, record in named if name > a.after)
    return {"keys": page.rows, "next": page.next}


@method(KeyRevokeArguments, subject="id")
async def key_revoke(engine: Engine, caller: Caller, a: KeyRevokeArguments) -> Result:
    deed = revocation(engine, a.id)
    engine.confirmations.use(caller.name, a.confirm, deed, force=a.force)
    record = await engine.keys.revoke(a.id)
    engine.revoke(a.id)
    return record.public()
