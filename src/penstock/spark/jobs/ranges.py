"""Which part of which partition a job reads, and how a Spark task gets at it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import FailedPrecondition
from penstock.model.topic import TopicKind
from penstock.spark.settings import PipelineSettings
from penstock.spark.source.access import NodeAccess
from penstock.spark.source.options import Connecting


def connecting(settings: PipelineSettings) -> Connecting:
    """The node of a pipeline, as a task is told of it; each process opens its own connection."""
    return Connecting(
        url=settings.url,
        api_key=settings.api_key,
        api_key_file=None if settings.api_key_file is None else str(settings.api_key_file),
        tls=None if settings.ca is None else str(settings.ca),
    )


@dataclass(frozen=True, kw_only=True)
class LogRange:
    """Sequences `first` to `last` of one partition; `last` < `first`: nothing."""

    topic: str
    partition: int
    first: int
    last: int
    dimensions: int

    @property
    def name(self) -> str:
        return f"{self.topic}-{self.partition}"

    @property
    def complete(self) -> bool:
        """Whether the log is there from its beginning."""
        return self.first == 1


def whole_log(node: Connecting, topics: Sequence[str]) -> list[LogRange]:
    """Everything readable of the topics' partitions, as of now."""
    access = node.access()
    ranges = []
    for topic in topics:
        dimensions = _dimensions(access, topic)
        ranges += [
            LogRange(
                topic=topic,
                partition=status.partition,
                first=status.sequence_first,
                last=status.readable,
                dimensions=dimensions,
            )
            for status in access.log_status(topic)
        ]
    return ranges


def log_until(node: Connecting, topics: Sequence[str], *, time_ms: int) -> list[LogRange]:
    """The topics' partitions up to the last batch that was written at or before `time_ms`."""
    access = node.access()
    return [
        LogRange(
            topic=one.topic,
            partition=one.partition,
            first=one.first,
            last=min(one.last, _after(access, one, time_ms) - 1),
            dimensions=one.dimensions,
        )
        for one in whole_log(node, topics)
    ]


def _after(access: NodeAccess, one: LogRange, time_ms: int) -> int:
    """The first sequence that was written later than `time_ms`."""
    found = access.call("log_find", topic=one.topic, partition=one.partition, time_ms=time_ms + 1)
    return int(found["sequence"])


def _dimensions(access: NodeAccess, topic: str) -> int:
    config = access.config(topic)
    if config.kind is not TopicKind.DELTA:
        raise FailedPrecondition(
            f"{topic} is a {config.kind.value} topic, not one of deltas", field="topics"
        )
    return config.dimensions
