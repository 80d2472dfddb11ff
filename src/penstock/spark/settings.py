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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from penstock.config import decode_path, read_toml
from penstock.errors import InvalidArgument
from penstock.model.topic import NAME as TOPIC_NAME
from penstock.propagation.options import PropagationOptions
from penstock.sinks.health import Patience

NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
TOPICS_MAX: Final = 64
SINKS_MAX: Final = 64
ROWS_MAX: Final = 1 << 30


class RowsPerTrigger(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of the adaptive rate, and where it starts."""

    min: int = 1_000
    max: int = 2_000_000
    initial: int = 100_000

    def validate(self) -> None:
        if not 1 <= self.min <= self.max <= ROWS_MAX:
            raise InvalidArgument(
                f"rows_per_trigger must have 1 <= min <= max <= {ROWS_MAX},"
                f" min is {self.min} and max is {self.max}",
                field="rows_per_trigger.max",
                limit=ROWS_MAX,
            )
        if not self.min <= self.initial <= self.max:
            raise InvalidArgument(
                f"rows_per_trigger.initial is {self.initial}, not from {self.min} to {self.max}",
                field="rows_per_trigger.initial",
                limit=self.max,
            )


class DeliveryOptions(Patience, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How sinks are served: bounds of a write, patience with failures, how often to tell."""

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
    options: dict[str, Any] = {}  # the rest of the table, for the sink itself

    @property
    def table(self) -> dict[str, Any]:
        return {"kind": self.kind, "name": self.name, **self.options}


class PipelineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    topics: tuple[str, ...]  # delta topics, the most urgent first
    state: Path  # a folder that driver and executors share
    url: str = "penstock://127.0.0.1:7440"
    api_key: str | None = None
    api_key_file: Path | None = None
    ca: Path | None = None  # authorities to trust for penstocks://
    master: str | None = None  # of a Spark cluster; None: this machine
    cores: int | None = None  # threads in local mode, spark.cores.max on a cluster
    spark: dict[str, str] = {}  # further settings of the session
    tasks: int | None = None  # of the fold, fixed at the first run; None: half the cores
    trigger_interval_s: float = 0.5  # at least this long from one trigger's start to the next
    target_trigger_s: float = 5.0  # the rate is adapted so that a trigger takes less
    rows_per_trigger: RowsPerTrigger = RowsPerTrigger()
    propagation: PropagationOptions = PropagationOptions()  # fixed at the first run
    delivery: DeliveryOptions = DeliveryOptions()  # sizes of writes, patience with sinks
    snapshot_deltas: int = 500_000  # folded by a partition between two snapshots of its state
    changes_bytes_max: int = 20 << 30  # not yet delivered; past it nothing more is read
    drain_s: float = 60.0  # for the sinks to catch up when the pipeline is told to stop
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
        settings = _convert(fields, cls)
        sinks = tuple(_sink(table, place) for place, table in enumerate(tables))
        return msgspec.structs.replace(settings, sinks=sinks).validate()

    def validate(self) -> PipelineSettings:
        """Raise `InvalidArgument` that names the first field that will not do, else return self
        with an absolute state folder: executors have a working directory of their own."""
        if not NAME.fullmatch(self.name):
            raise InvalidArgument(
                f"name must match {NAME.pattern}", field="name", limit=NAME.pattern
            )
        self._validate_topics()
        for name, (low, high) in BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise InvalidArgument(
                    f"{name} is {value}, must be from {low} to {high}", field=name, limit=high
                )
        self.rows_per_trigger.validate()
        self.propagation.validate()
        self.delivery.validate()
        if self.api_key is not None and self.api_key_file is not None:
            raise InvalidArgument("give api_key or api_key_file, not both", field="api_key_file")
        self._validate_sinks()
        return msgspec.structs.replace(self, state=self.state.absolute())

    def _validate_topics(self) -> None:
        if not 1 <= len(self.topics) <= TOPICS_MAX:
            raise InvalidArgument(
                f"topics must name 1 to {TOPICS_MAX} topics", field="topics", limit=TOPICS_MAX
            )
        for topic in self.topics:
            if not TOPIC_NAME.fullmatch(topic):
                raise InvalidArgument(f"no topic can be called {topic!r}", field="topics")
        if len(set(self.topics)) != len(self.topics):
            raise InvalidArgument("topics names one of them twice", field="topics")

    def _validate_sinks(self) -> None:
        if len(self.sinks) > SINKS_MAX:
            raise InvalidArgument(
                f"{len(self.sinks)} sinks, at most {SINKS_MAX}", field="sink", limit=SINKS_MAX
            )
        seen: set[str] = set()
        for place, sink in enumerate(self.sinks):
            if not NAME.fullmatch(sink.name):
                raise InvalidArgument(
                    f"a sink's name must match {NAME.pattern}, not {sink.name!r}",
                    field=f"sink[{place}].name",
                    limit=NAME.pattern,
                )
            if sink.name in seen:
                raise InvalidArgument(
                    f"two sinks are called {sink.name}: give one of them a name",
                    field=f"sink[{place}].name",
                )
            seen.add(sink.name)


BOUNDS: Final[dict[str, tuple[float, float]]] = {
    "cores": (1, 4096),
    "tasks": (1, 4096),
    "trigger_interval_s": (0.0, 3600.0),
    "target_trigger_s": (0.1, 3600.0),
    "snapshot_deltas": (1, 1 << 40),
    "changes_bytes_max": (1 << 20, 1 << 50),
    "drain_s": (0.0, 24 * 3600.0),
}


def _sink(table: dict[str, Any], place: int) -> SinkSettings:
    options = dict(table)
    kind = options.pop("kind", None)
    if not isinstance(kind, str) or not kind:
        raise InvalidArgument("a sink needs a kind", field=f"sink[{place}].kind")
    route = options.pop("route", ())
    routes = (route,) if isinstance(route, str) else tuple(route)
    if not all(isinstance(one, str) for one in routes):
        raise InvalidArgument(
            "a route is a text such as 'namespace=products'", field=f"sink[{place}].route"
        )
    name = options.pop("name", None)
    if name is None:
        name = kind if NAME.fullmatch(kind) else f"sink-{place}"
    if not isinstance(name, str):
        raise InvalidArgument("a sink's name is a text", field=f"sink[{place}].name")
    return SinkSettings(kind=kind, name=name, route=routes, options=options)


def _convert(fields: dict[str, Any], kind: type[PipelineSettings]) -> PipelineSettings:
    try:
        return msgspec.convert(fields, kind, dec_hook=decode_path)
    except msgspec.ValidationError as error:
        unknown = re.search(r"unknown field `(\w+)`", str(error))
        if unknown:
            raise InvalidArgument(f"no such option: {unknown[1]}", field=unknown[1]) from error
        missing = re.search(r"missing required field `(\w+)`", str(error))
        place = re.search(r"`\$\.([\w.]+)", str(error))
        field = missing[1] if missing else place[1] if place else "config"
        raise InvalidArgument(f"{field}: {error}", field=field) from error
