"""Penstock: a replicated priority log.

async with penstock.connect() as client:
    jobs = client.topic("jobs", of=dict)
    await jobs.put({"resize": "cat.png"}, priority=5)
    async for message in jobs.consume():
        async with message:
            print(message.value)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.errors import AlreadyExists as AlreadyExists
from penstock.errors import Backpressure as Backpressure
from penstock.errors import BatchAborted as BatchAborted
from penstock.errors import CallerError as CallerError
from penstock.errors import Corruption as Corruption
from penstock.errors import DiskFull as DiskFull
from penstock.errors import FailedPrecondition as FailedPrecondition
from penstock.errors import Fatal as Fatal
from penstock.errors import InvalidArgument as InvalidArgument
from penstock.errors import LeaseLost as LeaseLost
from penstock.errors import LimitExceeded as LimitExceeded
from penstock.errors import NotFound as NotFound
from penstock.errors import PenstockError as PenstockError
from penstock.errors import QuorumUnavailable as QuorumUnavailable
from penstock.errors import RetryableError as RetryableError
from penstock.errors import SequenceConflict as SequenceConflict
from penstock.errors import SinkRejected as SinkRejected
from penstock.errors import StaleProducer as StaleProducer
from penstock.errors import StorageFailed as StorageFailed
from penstock.errors import Unauthenticated as Unauthenticated
from penstock.errors import Unavailable as Unavailable
from penstock.errors import Unsupported as Unsupported
from penstock.errors import WorldMoved as WorldMoved
from penstock.errors import WrongEpoch as WrongEpoch
from penstock.model.version import __version__ as __version__

if TYPE_CHECKING:
    from penstock.client.client import Client as Client
    from penstock.client.delta.deltas import Deltas as Deltas
    from penstock.client.delta.fold import Vector as Vector
    from penstock.client.delta.subscription import Released as Released
    from penstock.client.delta.subscription import ReleasedBatch as ReleasedBatch
    from penstock.client.network.connection import Connection as Connection
    from penstock.client.network.endpoints import Tls as Tls
    from penstock.client.options import Options as Options
    from penstock.client.queue.entries import Item as Item
    from penstock.client.queue.leases import LeasedMessage as LeasedMessage
    from penstock.client.queue.leases import MessageBatch as MessageBatch
    from penstock.client.queue.messages import DeadLetters as DeadLetters
    from penstock.client.queue.messages import DeadMessage as DeadMessage
    from penstock.client.queue.messages import LogReader as LogReader
    from penstock.client.queue.messages import Message as Message
    from penstock.client.topic import BatchConsumer as BatchConsumer
    from penstock.client.topic import MessageConsumer as MessageConsumer
    from penstock.client.topic import PartitionStats as PartitionStats
    from penstock.client.topic import Topic as Topic
    from penstock.client.topic import TopicStats as TopicStats
    from penstock.model.delta import Delta as Delta
    from penstock.model.delta import Op as Op
    from penstock.model.delta import PriorityClass as PriorityClass
    from penstock.model.delta import Source as Source
    from penstock.model.topic import Compression as Compression
    from penstock.model.topic import Mode as Mode
    from penstock.model.topic import TopicConfig as TopicConfig
    from penstock.model.topic import TopicKind as TopicKind
    from penstock.sinks.index import Index as Index

DATA_FOLDER = "penstock-data"

# Where public names live that are imported when they are first asked for.
_LAZY = {
    "penstock.client.client": "Client",
    "penstock.client.delta.deltas": "Deltas",
    "penstock.client.delta.fold": "Vector",
    "penstock.client.delta.subscription": "Released ReleasedBatch",
    "penstock.client.network.connection": "Connection",
    "penstock.client.options": "Options",
    "penstock.client.queue.entries": "Item",
    "penstock.client.queue.leases": "LeasedMessage MessageBatch",
    "penstock.client.queue.messages": "DeadLetters DeadMessage LogReader Message",
    "penstock.client.topic": "BatchConsumer MessageConsumer PartitionStats Topic TopicStats",
    "penstock.model.delta": "Delta Op PriorityClass Source",
    "penstock.model.topic": "Compression Mode TopicConfig TopicKind",
}
_HOMES = {name: module for module, names in _LAZY.items() for name in names.split()}
_ERRORS = [
    name for name, kind in vars().items() if getattr(kind, "__module__", "") == "penstock.errors"
]

__all__ = sorted([*_HOMES, *_ERRORS, "__version__", "connect", "open_index"])


def connect(
    url: str | os.PathLike[str] | Sequence[str] | None = None,
    api_key: str | None = None,
    tls: Tls = None,
    *,
    options: Options | None = None,
) -> Client:
    """A client, to be entered with `async with`.

    `url` is `penstock://host:port`, `penstocks://host:port` (TLS), or the path of a folder: then
    the engine runs inside this process, on that folder. Nodes of one cluster stand side by side,
    `penstock://a:7440,b:7440`, or in a list of urls; one that answers is enough. Without it
    PENSTOCK_URL counts, and else the folder `./penstock-data`. `api_key` defaults to
    PENSTOCK_API_KEY.
    """
    from penstock.client.client import Client
    from penstock.client.network.endpoints import Remote
    from penstock.client.options import Options

    key = api_key if api_key is not None else os.environ.get("PENSTOCK_API_KEY") or None
    where: str | Sequence[str] = os.environ.get("PENSTOCK_URL") or DATA_FOLDER
    if url is not None:
        where = os.fspath(url) if isinstance(url, str | os.PathLike) else url
    chosen = options or Options()
    if isinstance(where, str) and "://" not in where:
        from penstock.server.embedded import EmbeddedNode, config_of

        return Client(EmbeddedNode(config_of(where), api_key=key), chosen)
    client = f"penstock-python/{__version__}"
    remote = Remote(where, api_key=key, tls=tls, client=client, codecs=chosen.codecs)
    return Client(remote, chosen)


def open_index(
    path: str | os.PathLike[str], *, storage_options: dict[str, str] | None = None
) -> Index:
    """The nearest-neighbour index that a pipeline's `index` sink keeps in a folder (or at an
    object store's address, reached by the sink's `storage_options`), to be searched. Needs
    `penstock[index]`."""
    from penstock.sinks.index import Index

    return Index(os.fspath(path), storage_options=storage_options)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
