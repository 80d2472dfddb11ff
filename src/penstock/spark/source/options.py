"""What the data source may be told: `spark.read.format("penstock").option(...)`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

import msgspec

from penstock.client.network.endpoints import Address
from penstock.errors import InvalidArgument
from penstock.propagation.options import PropagationOptions
from penstock.spark.source.access import NodeAccess
from penstock.spark.store import StoreAddress

Mode = Literal["messages", "deltas", "released", "vectors", "envelopes", "ranges"]
MODES: Final[tuple[str, ...]] = get_args(Mode)
FOLDED: Final = ("released", "vectors")  # made of what a partition's fold gives
SPLIT_ROWS: Final = 250_000
SNAPSHOT_DELTAS: Final = 500_000
# Options that Spark itself passes on to a source or a sink.
_SPARKS: Final = frozenset({"path", "checkpointlocation", "queryname"})
_CONNECTION: Final = frozenset({"url", "apikey", "apikeyfile", "tls"})
_READING: Final = frozenset(
    {"topic", "topics", "subscribepattern", "assign", "mode", "includeheaders",
     "startingoffsets", "startingtime", "startingoffsetsbytimestamp",
     "endingoffsets", "endingtime", "endingoffsetsbytimestamp",
     "minrowspertrigger", "maxtriggerdelay", "minpartitions",
     "maxrowspertrigger", "maxbytespertrigger", "splitrows", "failondataloss"}
)  # fmt: skip
_FOLDING: Final = frozenset({"state", "snapshotdeltas"})
_FOLDING_BELOW: Final = ("storage.", "propagation.")  # options with names of their own behind it
_SPLITTING: Final = frozenset({"splitrows", "minpartitions"})
_WRITING: Final = frozenset({"topic", "producer"})

# A place in every partition: a word, or the sequence of each partition by topic.
ByPartition = dict[str, dict[int, int]]
Place = Literal["earliest", "latest"] | ByPartition
Assigned = dict[str, Annotated[tuple[int, ...], msgspec.Meta(min_length=1)]]
_UNITS_S: Final = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}


class Connecting(msgspec.Struct, frozen=True, kw_only=True):
    """Where the node is and who we are there."""

    url: str
    api_key: str | None = None
    api_key_file: str | None = None
    tls: str | None = None  # a file with the authorities to trust; None: the system's

    def access(self) -> NodeAccess:
        return NodeAccess.shared(self.url, api_key=self._key(), tls=self.tls)

    def _key(self) -> str | None:
        if self.api_key_file is None:
            return self.api_key or os.environ.get("PENSTOCK_API_KEY") or None
        try:
            return Path(self.api_key_file).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise InvalidArgument(
                f"apiKeyFile cannot be read: {error}", field="apiKeyFile"
            ) from error


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a topic, or several, are read."""

    node: Connecting
    topics: tuple[str, ...] = ()  # an earlier one is more urgent
    pattern: str | None = None  # instead of `topics`: those there are with such a name
    assigned: Assigned = {}  # the only partitions that are read of these topics
    mode: Mode = "messages"
    starting: Place = "earliest"
    # Instead of `starting`: the first batch at or after, everywhere or by partition.
    starting_ms: int | ByPartition | None = None
    ending: Place = "latest"
    ending_ms: int | ByPartition | None = None  # instead of `ending`: up to the last batch before
    rows_max: int | None = None  # per trigger
    bytes_max: int | None = None  # per trigger
    rows_min: int = 0  # of a trigger, unless the one before is `delay_s` ago
    delay_s: float = 0.0
    partitions_min: int = 1  # of Spark, if there are as many batches
    headers: Literal["text", "binary"] = "text"  # the values of a row's headers
    split_rows: int = SPLIT_ROWS  # of one Spark partition
    fail_on_data_loss: bool = True
    # Of the modes that fold:
    state: StoreAddress | None = None  # where snapshots are; None: a fold begins with the log
    snapshot_deltas: int = SNAPSHOT_DELTAS  # sequences between two snapshots of a partition
    propagation: PropagationOptions = PropagationOptions()

    @staticmethod
    def of(options: Mapping[str, str]) -> ReadOptions:
        given = _Given(options, allowed=_CONNECTION | _READING | _FOLDING, below=_FOLDING_BELOW)
        mode = given.choice("mode", MODES, "messages")
        given.check_mode(mode)
        return ReadOptions(
            node=given.connecting(),
            **given.topics(),
            mode=mode,
            starting=given.place("startingOffsets", "earliest"),
            starting_ms=given.times("starting"),
            ending=given.place("endingOffsets", "latest"),
            ending_ms=given.times("ending"),
            rows_max=given.count("maxRowsPerTrigger"),
            bytes_max=given.count("maxBytesPerTrigger"),
            rows_min=given.count("minRowsPerTrigger") or 0,
            delay_s=given.duration_s("maxTriggerDelay", "15m"),
            partitions_min=given.count("minPartitions") or 1,
            headers=given.choice("includeHeaders", ("text", "binary"), "text"),
            split_rows=given.count("splitRows") or SPLIT_ROWS,
            fail_on_data_loss=given.choice("failOnDataLoss", ("true", "false"), "true") == "true",
            state=given.store(),
            snapshot_deltas=given.count("snapshotDeltas") or SNAPSHOT_DELTAS,
            propagation=given.propagation(),
        )


class WriteOptions(msgspec.Struct, frozen=True, kw_only=True):
    node: Connecting
    topic: str | None  # None: a column says where each row goes
    producer: str | None = None  # a name that makes the same write, done again, a no-op

    @staticmethod
    def of(options: Mapping[str, str]) -> WriteOptions:
        given = _Given(options, allowed=_CONNECTION | _WRITING)
        topic = given.get("topic") or given.get("path")
        return WriteOptions(node=given.connecting(), topic=topic, producer=given.get("producer"))


class _Given:
    """Options as Spark hands them over: case does not count, every value is text."""

    def __init__(
        self, options: Mapping[str, str], *, allowed: Iterable[str], below: tuple[str, ...] = ()
    ) -> None:
        self._values = {name.lower(): value for name, value in options.items()}
        unknown = self._values.keys() - set(allowed) - _SPARKS
        if unknown := {name for name in unknown if not name.startswith(below or ("\0",))}:
            field = min(unknown)
            names = [*sorted(allowed), *(f"{name}…" for name in below)]
            raise InvalidArgument(
                f"no such option: {field} (there are {', '.join(names)})", field=field
            )

    def check_mode(self, mode: str) -> None:
        """Refuse what a mode can make no use of."""
        for name in sorted(self._values):
            folds = name in _FOLDING or name.startswith(_FOLDING_BELOW)
            if folds and mode not in FOLDED:
                raise InvalidArgument(f"{name} is for the modes {', '.join(FOLDED)}", field=name)
            if name in _SPLITTING and mode in FOLDED:
                raise InvalidArgument(f"mode {mode} reads a partition in one piece", field=name)

    def below(self, prefix: str) -> dict[str, str]:
        """The options whose names begin with it, without it."""
        found = {n: value for n, value in self._values.items() if n.startswith(prefix)}
        return {name.removeprefix(prefix): value for name, value in found.items()}

    def store(self) -> StoreAddress | None:
        url, options = self.get("state"), self.below("storage.")
        if url is None and options:
            raise InvalidArgument("storage… is how the state is reached: name one", field="state")
        if url is None:
            return None
        place = url if "://" in url else str(Path(url).absolute())
        return StoreAddress(url=place.rstrip("/"), options=options)

    def propagation(self) -> PropagationOptions:
        given = self.below("propagation.")
        for name, value in given.items():
            known = PropagationOptions.__struct_fields__
            if name not in known or not value.isdecimal():
                raise InvalidArgument(
                    f"propagation.{name} {value}: there are whole numbers {', '.join(known)}",
                    field=f"propagation.{name}",
                )
        return PropagationOptions(**{n: int(value) for n, value in given.items()}).validate()

    def get(self, name: str) -> str | None:
        return self._values.get(name.lower()) or None

    def choice(self, name: str, among: tuple[str, ...], default: str) -> Any:
        value = (self.get(name) or default).lower()
        if value not in among:
            raise InvalidArgument(
                f"{name} is one of {', '.join(among)}, not {value}", field=name, limit=list(among)
            )
        return value

    def count(self, name: str) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        if not value.isdecimal() or not 1 <= int(value) < 1 << 62:
            raise InvalidArgument(f"{name} is a whole number from 1, not {value}", field=name)
        return int(value)

    def duration_s(self, name: str, default: str) -> float:
        value = self.get(name) or default
        found = re.fullmatch(r"(\d+)(ms|s|m|h)", value)
        if found is None:
            raise InvalidArgument(f"{name} is as 500ms, 30s, 15m or 1h, not {value}", field=name)
        return int(found[1]) * _UNITS_S[found[2]]

    def times(self, which: str) -> int | ByPartition | None:
        name = f"{which}OffsetsByTimestamp"
        if self.get(name) is None:
            return self.time_ms(f"{which}Time")
        found: ByPartition = self.json(name, ByPartition, {"topic": {"0": 1767319445500}})
        return found

    def time_ms(self, name: str) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        try:
            time = datetime.fromisoformat(value)
        except ValueError as error:
            raise InvalidArgument(f"{name} is not an ISO 8601 time: {value}", field=name) from error
        return round((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)

    def place(self, name: str, default: Literal["earliest", "latest"]) -> Place:
        value = self.get(name)
        if value is None or value.lower() in ("earliest", "latest"):
            return default if value is None else value.lower()  # type: ignore[return-value]
        found: Place = self.json(name, ByPartition, {"topic": {"0": 17}}, "earliest, latest or ")
        return found

    def json(self, name: str, kind: Any, example: Any, words: str = "") -> Any:
        value = self.get(name) or ""
        try:
            return msgspec.json.decode(value, type=kind)
        except msgspec.MsgspecError as error:
            shape = words + json.dumps(example)
            raise InvalidArgument(f"{name} is {shape}, not {value}: {error}", field=name) from error

    def topics(self) -> dict[str, Any]:
        """Which topics are read: by their names, by a pattern, or some partitions of each."""
        names, pattern = self.get("topic") or self.get("path"), self.get("subscribePattern")
        ways = (names, self.get("topics"), pattern, self.get("assign"))
        if sum(way is not None for way in ways) != 1:
            raise InvalidArgument(
                "give topic, topics, subscribePattern or assign, one of them", field="topic"
            )
        if pattern is not None:
            try:
                return {"pattern": re.compile(pattern).pattern}
            except re.error as error:
                told = f"subscribePattern is no regular expression: {error}"
                raise InvalidArgument(told, field="subscribePattern") from error
        if self.get("assign") is not None:
            assigned = self.json("assign", Assigned, {"topic": [0, 2]})
            return {"topics": tuple(assigned), "assigned": assigned}
        split = (names or self.get("topics") or "").split(",")
        found = tuple(name.strip() for name in split if name.strip())
        if len(set(found)) != len(found) or not found:
            raise InvalidArgument("topics are names, each once, with commas", field="topics")
        return {"topics": found}

    def connecting(self) -> Connecting:
        url = self.get("url") or os.environ.get("PENSTOCK_URL")
        if url is None:
            raise InvalidArgument("url is missing: penstock://host:port", field="url")
        Address.parse_all(url)
        key, file = self.get("apiKey"), self.get("apiKeyFile")
        if key and file:
            raise InvalidArgument("give apiKey or apiKeyFile, not both", field="apiKey")
        return Connecting(url=url, api_key=key, api_key_file=file, tls=self.get("tls"))
