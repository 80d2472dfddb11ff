"""Administrative calls: one table from a method's name to its arguments and what it does."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

import msgspec

from penstock.errors import InvalidArgument, NotFound, PenstockError, Unauthenticated
from penstock.model.version import __version__
from penstock.node import logs
from penstock.node.confirmations import NEED_CONFIRMATION
from penstock.node.engine import Engine, partition_reading
from penstock.node.partition import Partition
from penstock.node.topic import Topic


class Caller(NamedTuple):
    """Who calls: the API key's id, if any, and the connection."""

    key_id: str | None
    connection: int
    peer: bool = False  # another node of the cluster


def check_peer(caller: Caller) -> None:
    """Raise unless another node of the cluster calls."""
    if not caller.peer:
        raise Unauthenticated("only a node of the cluster may do this")


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
    subject: Callable[[Any], str]


METHODS: dict[str, Method] = {}


def method(
    arguments: type[Arguments], *, audited: bool = False, subject: str = "topic"
) -> Callable[[Any], Any]:
    """Register a call under its function's name."""

    def register(run: Any) -> Any:
        METHODS[run.__name__] = Method(
            arguments, run, audited, lambda a: str(getattr(a, subject, "") or "")
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
            parsed = _parse(found.arguments, arguments)
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


def _parse(type_: type[Any], arguments: dict[str, Any]) -> Any:
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


# --- what is ---


class StatsArguments(Arguments, frozen=True):
    topic: str | None = None


@method(StatsArguments)
async def stats(engine: Engine, _: Caller, a: StatsArguments) -> dict[str, Any]:
    chosen = [engine.topic(a.topic)] if a.topic else list(engine.topics.values())
    now_ms = engine.clock.now_ms()
    return {"topics": [_topic_stats(engine, topic, now_ms) for topic in chosen]}


_SUMMED: Final = ("ready", "delayed", "leased", "dead", "backlog", "bytes")


def _topic_stats(engine: Engine, topic: Topic, now_ms: int) -> dict[str, Any]:
    partitions = [_partition_stats(engine, topic, partition, now_ms) for partition in topic.local]
    ages = [p["oldest_age_ms"] for p in partitions if p["oldest_age_ms"] is not None]
    return {
        "name": topic.config.name,
        "mode": topic.config.mode.value,
        "paused": topic.config.paused,
        **{name: sum(p[name] for p in partitions) for name in _SUMMED},
        **{f"{name}_total": count for name, count in topic.totals.items()},
        "oldest_age_ms": max(ages, default=None),
        "rank_error_max": topic.rank_error_max,
        "consumers": topic.lease_streams,
        "partitions": partitions,
    }


def _partition_stats(
    engine: Engine, topic: Topic, partition: Partition, now_ms: int
) -> dict[str, Any]:
    reading = partition_reading(topic, partition, now_ms)
    age_s, snapshot_age_s = reading.oldest_age_s, reading.snapshot_age_s
    return {
        "partition": partition.index,
        "coordinator": engine.identity.node,
        "epoch": reading.epoch,
        "sequence_first": partition.log.sequence_first,
        "sequence_last": partition.log.sequence_last,
        "sequence_committed": reading.sequence_committed,
        "ready": reading.ready,
        "delayed": reading.delayed,
        "leased": reading.inflight,
        "dead": reading.dead,
        "backlog": reading.backlog,
        "oldest_age_ms": None if age_s is None else round(age_s * 1000),
        "bytes": reading.log_bytes,
        "segments": reading.log_segments,
        "snapshot_sequence": partition.snapshot.sequence,
        "snapshot_bytes": partition.snapshot.bytes,
        "snapshot_age_ms": None if snapshot_age_s is None else round(snapshot_age_s * 1000),
    }


@method(StatsArguments, audited=True)
async def snapshot(engine: Engine, _: Caller, a: StatsArguments) -> dict[str, Any]:
    """Take snapshots now."""
    chosen = [engine.topic(a.topic)] if a.topic else list(engine.topics.values())
    taken = []
    for topic in chosen:
        for partition in topic.local:
            facts = await engine.snapshot(topic, partition)
            taken.append(
                {
                    "topic": topic.config.name,
                    "partition": partition.index,
                    "sequence": facts.sequence,
                    "bytes": facts.bytes,
                }
            )
    return {"snapshots": taken}


@method(Arguments, audited=True)
async def verify(engine: Engine, _: Caller, a: Arguments) -> dict[str, Any]:
    """Verify all sealed segments now."""
    return {"bytes": await engine.verify(), "ok": engine.damage is None, "damage": engine.damage}


@method(Arguments)
async def node_status(engine: Engine, _: Caller, a: Arguments) -> dict[str, Any]:
    return {
        "node": engine.identity.node,
        "version": __version__,
        "format": engine.folder.format,
        "data": str(engine.config.data),
        "uptime_ms": engine.clock.now_ms() - engine.started_ms,
        "topics": len(engine.topics),
        "connections": len(engine.connections),
        "keys_required": engine.config.keys_required,
        "healthy": engine.fatal_error is None and not engine.stopping,
        "damage": engine.damage,
    }
