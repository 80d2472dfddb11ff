"""What the data source may be told: `spark.read.format("penstock").option(...)`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, get_args

import msgspec

from penstock.client.network.endpoints import Address
from penstock.errors import InvalidArgument
from penstock.spark.source.access import NodeAccess

Mode = Literal["messages", "deltas", "envelopes", "ranges"]
MODES: Final[tuple[str, ...]] = get_args(Mode)
SPLIT_ROWS: Final = 250_000
# Options that Spark itself passes on to a source or a sink.
_SPARKS: Final = frozenset({"path", "checkpointlocation", "queryname"})
_CONNECTION: Final = frozenset({"url", "apikey", "apikeyfile", "tls"})
_READING: Final = frozenset(
    {"topic", "topics", "mode", "startingoffsets", "startingtime", "endingoffsets", "endingtime",
     "maxrowspertrigger", "maxbytespertrigger", "ratefile", "splitrows", "failondataloss"}
)  # fmt: skip
_WRITING: Final = frozenset({"topic", "producer"})

# A place in every partition: a word, or the sequence of each partition by topic.
Place = Literal["earliest", "latest"] | dict[str, dict[int, int]]


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
    topics: tuple[str, ...]  # an earlier one is more urgent
    mode: Mode = "messages"
    starting: Place = "earliest"
    starting_ms: int | None = None  # instead of `starting`: the first batch at or after
    ending: Place = "latest"
    ending_ms: int | None = None  # instead of `ending`: up to the last batch before
    rows_max: int | None = None  # per trigger
    bytes_max: int | None = None  # per trigger
    rate_file: str | None = None  # holds rows per trigger, looked up at each
    split_rows: int = SPLIT_ROWS  # of one Spark partition
    fail_on_data_loss: bool = True

    @staticmethod
    def of(options: Mapping[str, str]) -> ReadOptions:
        given = _Given(options, allowed=_CONNECTION | _READING)
        return ReadOptions(
            node=given.connecting(),
            topics=given.topics(),
            mode=given.choice("mode", MODES, "messages"),
            starting=given.place("startingOffsets", "earliest"),
            starting_ms=given.time_ms("startingTime"),
            ending=given.place("endingOffsets", "latest"),
            ending_ms=given.time_ms("endingTime"),
            rows_max=given.count("maxRowsPerTrigger"),
            bytes_max=given.count("maxBytesPerTrigger"),
            rate_file=given.get("rateFile"),
            split_rows=given.count("splitRows") or SPLIT_ROWS,
            fail_on_data_loss=given.choice("failOnDataLoss", ("true", "false"), "true") == "true",
        )


class WriteOptions(msgspec.Struct, frozen=True, kw_only=True):
    node: Connecting
    topic: str
    producer: str | None = None  # a name that makes the same write, done again, a no-op

    @staticmethod
    def of(options: Mapping[str, str]) -> WriteOptions:
        given = _Given(options, allowed=_CONNECTION | _WRITING)
        topic = given.get("topic") or given.get("path")
        if not topic:
            raise InvalidArgument("topic is missing", field="topic")
        return WriteOptions(node=given.connecting(), topic=topic, producer=given.get("producer"))


class _Given:
    """Options as Spark hands them over: case does not count, every value is text."""

    def __init__(self, options: Mapping[str, str], *, allowed: Iterable[str]) -> None:
        self._values = {name.lower(): value for name, value in options.items()}
        unknown = self._values.keys() - set(allowed) - _SPARKS
        if unknown:
            field = min(unknown)
            raise InvalidArgument(
                f"no such option: {field} (there are {', '.join(sorted(allowed))})", field=field
            )

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
        try:
            return msgspec.json.decode(value, type=dict[str, dict[int, int]])
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            shape = json.dumps({"topic": {"0": 17}})
            raise InvalidArgument(
                f"{name} is earliest, latest or {shape}, not {value}: {error}", field=name
            ) from error

    def topics(self) -> tuple[str, ...]:
        one, many = self.get("topic") or self.get("path"), self.get("topics")
        if bool(one) == bool(many):
            raise InvalidArgument("give topic or topics, one of them", field="topic")
        found = tuple(name.strip() for name in (many or one or "").split(",") if name.strip())
        if len(set(found)) != len(found) or not found:
            raise InvalidArgument("topics are names, each once, with commas", field="topics")
        return found

    def connecting(self) -> Connecting:
        url = self.get("url") or os.environ.get("PENSTOCK_URL")
        if url is None:
            raise InvalidArgument("url is missing: penstock://host:port", field="url")
        Address.parse_all(url)
        key, file = self.get("apiKey"), self.get("apiKeyFile")
        if key and file:
            raise InvalidArgument("give apiKey or apiKeyFile, not both", field="apiKey")
        return Connecting(url=url, api_key=key, api_key_file=file, tls=self.get("tls"))
