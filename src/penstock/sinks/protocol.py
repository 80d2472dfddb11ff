"""What a sink is, and the ports that sinks are handed.

The pipeline numbers its triggers 0, 1, 2 … and hands each sink their changes as `Work`. It keeps a
durable cursor per sink and moves it after `write` returned; so after a crash a sink sees the last
work again, perhaps cut differently. The rules that make its effect happen once:

- `write` is durable when it returns. Writing a trigger again, or an older one after a newer one,
  changes nothing.
- Of two states of a vector the one with the higher revision wins, in whatever order they come. A
  deleted vector does not come back by a late, older state.
- Rows that can never be taken are reported by `SinkRejected` *after* all the others were written;
  the pipeline takes them to the dead letters and goes on. Every other error means that the work is
  offered again later.

One thread calls a sink's methods; they block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Flag, auto
from typing import Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.propagation.fold.releases import ReleasedRows


class Feed(Flag):
    """What a sink wants to be handed."""

    STATES = auto()
    DELTAS = auto()
    PAYLOADS = auto()  # deltas with their original bytes
    ROWS = auto()  # deltas in the kernels' own columns; only for sinks that a node hosts


@dataclass(frozen=True, kw_only=True)
class Work:
    """The changes of the triggers `first` to `last`; more than one when the sink is behind.

    `pipeline` names one numbering of triggers: a pipeline whose state was thrown away has a new
    name, or its first triggers would be taken for old ones. Deltas stand in the order of release
    within each log partition, states at most once per vector. Feeds nobody asked for are None.
    """

    pipeline: str
    first: int
    last: int
    states: pa.Table | None = None
    deltas: pa.Table | None = None
    rows: ReleasedRows | None = None
    # Of the oldest of them, by the node's performance counter; None where that is not known, as
    # in what was read back from the log.
    committed_at: float | None = None


@runtime_checkable
class Sink(Protocol):
    """One destination. `ordered` sinks get triggers one after the other and all lanes together;
    the others may get a trigger's lanes apart, the urgent ones of later triggers first.

    A sink that only a node hosts may say two things more, by attributes that are True. `volatile`:
    it loses what it holds with its process, and is filled from the beginning of the log each time.
    It may have a method `forget`, called with each partition that has moved to another node.
    `inline`: its `write` never blocks and takes no longer than the rest of a commit, so it is
    called in the step of the node's loop that released the rows."""

    name: str
    feed: Feed
    ordered: bool

    def open(self) -> None:
        """Connect, create what is missing. Raises `Unavailable`; may be called again then."""
        ...

    def write(self, work: Work) -> None: ...

    def cursor(self) -> int | None:
        """The last trigger that it durably holds, if it knows by itself."""
        ...

    def scan(self) -> Iterator[pa.RecordBatch]:
        """Its living vectors, each once: namespace, vector_id, vector, metadata, revision.

        A sink that keeps no state raises `Unsupported`.
        """
        ...

    def reset(self) -> None:
        """Empty it, before it is filled anew."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Items:
    """Messages of one producer, in the order of their sequences."""

    sequences: NDArray[np.int64]  # strictly ascending from 1 on; gaps are what a route left out
    payloads: pa.BinaryArray
    priorities: NDArray[np.int64] | None = None  # None: 0
    keys: pa.BinaryArray | None = None  # ordering keys, null: none
    headers: pa.BinaryArray | None = None  # msgpack maps, null or empty: none

    def __len__(self) -> int:
        return len(self.sequences)

    def take(self, rows: NDArray[np.int64]) -> Items:
        chosen = pa.array(rows)
        return Items(
            sequences=self.sequences[rows],
            payloads=self.payloads.take(chosen),
            priorities=None if self.priorities is None else self.priorities[rows],
            keys=None if self.keys is None else self.keys.take(chosen),
            headers=None if self.headers is None else self.headers.take(chosen),
        )

    def slice(self, start: int, end: int) -> Items:
        count = end - start
        return Items(
            sequences=self.sequences[start:end],
            payloads=self.payloads.slice(start, count),
            priorities=None if self.priorities is None else self.priorities[start:end],
            keys=None if self.keys is None else self.keys.slice(start, count),
            headers=None if self.headers is None else self.headers.slice(start, count),
        )


@runtime_checkable
class TopicWriter(Protocol):
    """A node's topics, as a sink writes to them.

    Exactly once rests on the node's producer keys, which hold per *destination* partition: a
    message is known there by (producer, epoch, sequence). A sink names one producer per *source*
    partition and numbers its messages by the delta's ordinal, so that the key is a function of the
    log. It must also always lead to the same place: the writer puts a delta where its vector's
    hash says (in a topic of kind `delta`), any other message into `partition`, modulo the topic's
    partitions. A topic's partitions never change, so every key has one home, and every resend is
    recognised there. Neighbouring ordinals in the same partition make one run; a run starts anew
    at each gap.
    """

    def append(
        self, topic: str, *, producer: str, epoch: int, items: Items, partition: int
    ) -> None:
        """Durable on return; any number of items (the writer cuts requests to the limits).

        `partition` is the source's. Raises `InvalidArgument` if the node refuses one of the items
        for what it is: then some of the others may not be written either. Anything else: unknown,
        say it again.
        """
        ...

    def close(self) -> None: ...
