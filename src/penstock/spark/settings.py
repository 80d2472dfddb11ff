"""What a pipeline is told: `pipeline.toml`, read once and checked as a whole.

    name = "vectors"
    url = "penstock://127.0.0.1:7440"
    topics = ["vectors"]
    state = "pipeline-state"

    [[sink]]
    kind = "lake"
    path = "lake"

A key that nothing reads is an error, not a guess. In a `[[sink]]` table `kind`, `name` and `route`
are the pipeline's; the rest belongs to the sink, which checks it when it is built.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from penstock.config import decode_path, read_toml
from penstock.errors import InvalidArgument
from penstock.model.topic import NAME as TOPIC_NAME
from penstock.propagation.options import PropagationOptions
from penstock.sinks.health import Patience
from penstock.spark.store import StoreAddress

NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
TOPICS_MAX: Final = 64
SINKS_MAX: Final = 64
NO_TRANSFORM: Final = "none"
BACKFILLS: Final = ("log", "lake", "none")
ROWS_MAX: Final = 1 << 30
EXECUTORS_S: Final = 300.0
BOUNDS: Final[dict[str, tuple[float, float]]] = {
    "cores": (1, 4096),
    "tasks": (1, 4096),
    "trigger_interval_s": (0.0, 3600.0),
    "target_trigger_s": (0.1, 3600.0),
    "snapshot_deltas": (1, 1 << 40),
    "changes_bytes_max": (1 << 20, 1 << 50),
    "drain_s": (0.0, 24 * 3600.0),
    "executors_s": (1.0, 24 * 3600.0),
}


class RowsPerTrigger(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of the adaptive rate, and where it starts."""

    min: int = 1_000
    max: int = 2_000_000
    initial: int = 100_000


class DeliveryOptions(Patience, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rows_per_write_max: int = 100_000  # a trigger with more goes to an ordered sink whole
    bytes_per_write_max: int = 256 << 20
    rows_together_max: int = 10_000  # so few waiting rows are not worth a write for each lane
    hang_s: float = 60.0  # a call of a sink that takes longer is shown as hanging
    status_s: float = 1.0  # between two writings of status.json
    poll_s: float = 1.0  # an idle sink looks round this often, even if nobody wakes it

    def validate(self) -> DeliveryOptions:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise InvalidArgument(f"{name} must be greater than 0", field=name, limit=0)
        return self


class SinkSettings(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    name: str  # of its cursor, status and metrics; the kind unless said
    route: tuple[str, ...] = ()  # which deltas it gets; empty: all of them
    # A function between the fold and this sink, as module:function; "none" if it is to have none.
    transform: str | None = None
    # Where a sink that lacks what was before gets it from, or "none". None: from the log, or from a
    # lake of the pipeline where the log no longer reaches back.
    backfill: str | None = None
    options: dict[str, Any] = {}  # the rest of the table, for the sink itself


class TransformSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    function: str | None = None  # between the fold and every sink of vectors without one of its own


class PipelineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    topics: tuple[str, ...]  # delta topics, the most urgent first
    state: str  # a folder, or a place in an object store, that driver and executors reach
    storage: dict[str, str] = {}  # how an object store is reached: credentials, endpoint, region
    url: str = "penstock://127.0.0.1:7440"
    api_key: str | None = None
    api_key_file: Path | None = None
    ca: Path | None = None  # authorities to trust for penstocks://
    master: str | None = None  # of a Spark cluster; None: this machine
    cores: int | None = None  # threads in local mode, spark.cores.max on a cluster
    executors_s: float = EXECUTORS_S  # for a cluster to grant an executor
    spark: dict[str, str] = {}  # further settings of the session
    tasks: int | None = None  # of the fold at a time; None: half the cores
    trigger_interval_s: float = 0.5  # at least this long from one trigger's start to the next
    target_trigger_s: float = 5.0  # the rate is adapted so that a trigger takes less
    rows_per_trigger: RowsPerTrigger = RowsPerTrigger()
    propagation: PropagationOptions = PropagationOptions()  # fixed at the first run
    delivery: DeliveryOptions = DeliveryOptions()  # sizes of writes, patience with sinks
    snapshot_deltas: int = 500_000  # folded by a partition between two snapshots of its state
    changes_bytes_max: int = 20 << 30  # not yet delivered; past it nothing more is read
    drain_s: float = 60.0  # for the sinks to catch up when the pipeline is told to stop
    transform: TransformSettings = TransformSettings()
    sinks: tuple[SinkSettings, ...] = ()

    @classmethod
    def load(cls, file: Path, *, overrides: Mapping[str, Any] | None = None) -> PipelineSettings:
        """Read a TOML file; `overrides` replace its top-level keys unless they are None."""
        given = {name: value for name, value in (overrides or {}).items() if value is not None}
        return cls.of(read_toml(file) | given)

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> PipelineSettings:
        """From the tree that the file's text stands for; the sinks are its `sink` tables."""
        fields = dict(tree)
        if "sinks" in fields:
            raise InvalidArgument(
                "no such option: sinks (a sink is a [[sink]] table)", field="sinks"
            )
        tables = fields.pop("sink", [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise InvalidArgument("sink must be a list of tables: [[sink]]", field="sink")
        settings = _convert(fields)
        sinks = tuple(_sink(table, place) for place, table in enumerate(tables))
        return msgspec.structs.replace(settings, sinks=sinks).validate()

    def validate(self) -> PipelineSettings:
        """Raise `InvalidArgument` that names the first field that will not do, else return self
        with an absolute state: executors have a working directory of their own."""
        for name, (low, high) in BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise InvalidArgument(
                    f"{name} is {value}, must be from {low} to {high}", field=name, limit=high
                )
        for field, wrong, message, limit in (*self._rules(), *self._sink_rules()):
            if wrong:
                raise InvalidArgument(message, field=field, limit=limit)
        self.propagation.validate()
        self.delivery.validate()
        place = self.state if "://" in self.state else str(Path(self.state).absolute())
        return msgspec.structs.replace(self, state=place.rstrip("/"))

    @property
    def store(self) -> StoreAddress:
        return StoreAddress(url=self.state, options=self.storage)

    def transform_of(self, sink: SinkSettings) -> str | None:
        """The function that a sink of vectors has: its own, else that of all of them."""
        chosen = sink.transform or self.transform.function
        return None if chosen == NO_TRANSFORM else chosen

    def _rules(self) -> Iterator[tuple[str, bool, str, Any]]:
        """A field, whether it is wrong, why, and its limit."""
        topics, rows, like = self.topics, self.rows_per_trigger, NAME.pattern
        yield "name", not NAME.fullmatch(self.name), f"name must match {like}", like
        wrong = not 1 <= len(topics) <= TOPICS_MAX
        yield "topics", wrong, f"topics must name 1 to {TOPICS_MAX} topics", TOPICS_MAX
        for topic in topics:
            wrong = not TOPIC_NAME.fullmatch(topic)
            yield "topics", wrong, f"no topic can be called {topic!r}", None
        yield "topics", len(set(topics)) != len(topics), "topics names one of them twice", None
        least = f"1 <= min <= max <= {ROWS_MAX}, min is {rows.min} and max is {rows.max}"
        wrong = not 1 <= rows.min <= rows.max <= ROWS_MAX
        yield "rows_per_trigger.max", wrong, f"rows_per_trigger must have {least}", ROWS_MAX
        field, wrong = "rows_per_trigger.initial", not rows.min <= rows.initial <= rows.max
        told = f"{field} is {rows.initial}, not from {rows.min} to {rows.max}"
        yield field, wrong, told, rows.max
        wrong = self.api_key is not None and self.api_key_file is not None
        yield "api_key_file", wrong, "give api_key or api_key_file, not both", None

    def _sink_rules(self) -> Iterator[tuple[str, bool, str, Any]]:
        names = [sink.name for sink in self.sinks]
        many = f"{len(names)} sinks, at most {SINKS_MAX}"
        yield "sink", len(names) > SINKS_MAX, many, SINKS_MAX
        for place, name in enumerate(names):
            field = f"sink[{place}].name"
            like = f"a sink's name must match {NAME.pattern}, not {name!r}"
            yield field, not NAME.fullmatch(name), like, NAME.pattern
            twice = f"two sinks are called {name}: give one of them a name"
            yield field, name in names[:place], twice, None


def _sink(table: dict[str, Any], place: int) -> SinkSettings:
    options = dict(table)
    kind, route, name = (options.pop(key, None) for key in ("kind", "route", "name"))
    backfill, transform = options.pop("backfill", None), options.pop("transform", None)
    routes = (route,) if isinstance(route, str) else tuple(route or ())
    if name is None:
        name = kind if isinstance(kind, str) and NAME.fullmatch(kind) else f"sink-{place}"
    like = "a route is a text such as 'namespace=products'"
    for field, wrong, message in (
        ("kind", not isinstance(kind, str) or not kind, "a sink needs a kind"),
        ("route", not all(isinstance(one, str) for one in routes), like),
        ("name", not isinstance(name, str), "a sink's name is a text"),
        ("transform", not isinstance(transform, str | None), "a transform is module:function"),
        (
            "backfill",
            backfill not in (None, *BACKFILLS),
            f"backfill is one of {', '.join(BACKFILLS)}",
        ),
    ):
        if wrong:
            raise InvalidArgument(message, field=f"sink[{place}].{field}")
    return SinkSettings(
        kind=kind, name=name, route=routes, transform=transform, backfill=backfill, options=options
    )


def _convert(fields: dict[str, Any]) -> PipelineSettings:
    try:
        return msgspec.convert(fields, PipelineSettings, dec_hook=decode_path)
    except msgspec.ValidationError as error:
        unknown = re.search(r"unknown field `(\w+)`", str(error))
        if unknown:
            raise InvalidArgument(f"no such option: {unknown[1]}", field=unknown[1]) from error
        missing = re.search(r"missing required field `(\w+)`", str(error))
        place = re.search(r"`\$\.([\w.]+)", str(error))
        field = missing[1] if missing else place[1] if place else "config"
        raise InvalidArgument(f"{field}: {error}", field=field) from error
