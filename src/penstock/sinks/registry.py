"""From a `[[sink]]` table to a sink.

A sink's options are the keyword parameters of its class; their annotations say what they take.
Three parameters are filled in here: `name`, `pipeline` (the numbering of triggers that the sink
will see), and `writer`, for a sink that writes to topics: then the table may also say which node
(`url`, `api_key` or `api_key_file`, `ca`); without, it is the pipeline's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final, Protocol, cast, get_type_hints

import msgspec

from penstock.errors import InvalidArgument
from penstock.sinks.protocol import Sink, TopicWriter

KINDS: Final = {
    "lake": "penstock.sinks.lake:LakeSink",
    "index": "penstock.sinks.index:IndexSink",
    "memory": "penstock.sinks.memory_index:MemoryIndexSink",
    "cache": "penstock.sinks.cache:CacheSink",
    "remote": "penstock.sinks.topics:RemoteSink",
    "notify": "penstock.sinks.topics:NotifySink",
}
GROUP: Final = "penstock.sinks"  # of entry points
_GIVEN: Final = frozenset({"self", "name", "pipeline", "writer", "now_ms"})
_NODE: Final = ("url", "api_key", "api_key_file", "ca")


class OpenWriter(Protocol):
    """Reaches a node for a sink that writes to topics; `url` None is the pipeline's node."""

    def __call__(self, *, url: str | None, api_key: str | None, ca: str | None) -> TopicWriter: ...


def build(table: Mapping[str, Any], *, pipeline: str, open_writer: OpenWriter) -> Sink:
    """The sink that `table` describes, not yet opened. Raises `InvalidArgument`."""
    options = dict(table)
    kind = options.pop("kind", None)
    if not isinstance(kind, str) or not kind:
        raise InvalidArgument("a sink needs a kind", field="kind", limit=sorted(KINDS))
    name = options.pop("name", kind)
    make = sink_class(kind)
    parameters = inspect.signature(make).parameters
    given: dict[str, Any] = {}
    if "writer" in parameters:
        node = {option: options.pop(option, None) for option in _NODE}
        given["writer"] = _writer(node, open_writer)
    if "pipeline" in parameters:
        given["pipeline"] = pipeline
    sink = make(name, **_checked(make, parameters, options, kind=kind), **given)
    return cast(Sink, sink)


def sink_class(kind: str) -> Any:
    """The class behind a kind: built in, an entry point, or `module:Class`."""
    target = KINDS.get(kind)
    if target is None:
        found = entry_points(group=GROUP, name=kind)
        target = next(iter(found)).value if found else kind
    module, _, attribute = target.partition(":")
    if not attribute:
        raise InvalidArgument(
            f"no sink is called {kind}: use one of {sorted(KINDS)}, or module:Class",
            field="kind",
            limit=sorted(KINDS),
        )
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        extra = f" (install penstock[{kind}])" if kind in KINDS else ""
        raise InvalidArgument(
            f"the sink {kind} cannot be loaded: {error}{extra}", field="kind"
        ) from error


def _checked(
    make: Any, parameters: Mapping[str, inspect.Parameter], options: dict[str, Any], *, kind: str
) -> dict[str, Any]:
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return options
    hints = get_type_hints(make.__init__)
    known = parameters.keys() - _GIVEN
    for name in options:
        if name not in known:
            raise InvalidArgument(
                f"a {kind} sink has no option {name}, but {sorted(known)}",
                field=name,
                limit=sorted(known),
            )
    for name in known - options.keys():
        if parameters[name].default is inspect.Parameter.empty:
            raise InvalidArgument(f"a {kind} sink needs {name}", field=name)
    return {name: _converted(name, value, hints.get(name, Any)) for name, value in options.items()}


def _converted(name: str, value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{name}: {error}", field=name) from error


def _writer(node: dict[str, Any], open_writer: OpenWriter) -> TopicWriter:
    texts = {name: _converted(name, value, str | None) for name, value in node.items()}
    if texts["api_key"] is not None and texts["api_key_file"] is not None:
        raise InvalidArgument("give api_key or api_key_file, not both", field="api_key_file")
    key = texts["api_key"]
    if texts["api_key_file"] is not None:
        try:
            key = Path(texts["api_key_file"]).read_text("utf-8").strip()
        except OSError as error:
            raise InvalidArgument(
                f"cannot read {texts['api_key_file']}: {error.strerror}", field="api_key_file"
            ) from error
    return open_writer(url=texts["url"], api_key=key, ca=texts["ca"])
