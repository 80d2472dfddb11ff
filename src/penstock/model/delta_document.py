"""A delta as a document of plain values, for people and for JSON."""

from __future__ import annotations

from typing import Any

from penstock.model.delta import Delta


def document_of(delta: Delta) -> dict[str, Any]:
    """What a delta says; what it does not have is left out."""
    found: dict[str, Any] = {
        "delta_id": delta.delta_id.hex(),
        "parent": None if delta.parent is None else delta.parent.hex(),
        "namespace": delta.namespace,
        "vector_id": delta.vector_id,
        "op": delta.op.name.lower(),
        "origin": delta.origin,
        "clock": delta.clock,
        "time": delta.time,
        "time_ms": delta.time >> 16,
        "priority": delta.priority.name.lower(),
        "source": delta.source.name.lower(),
        "indices": None if delta.indices is None else delta.indices.tolist(),
        "values": None if delta.values is None else delta.values.tolist(),
        "metadata": delta.metadata,
    }
    return {name: value for name, value in found.items() if value is not None}
