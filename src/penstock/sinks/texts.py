"""Metadata, headers and clocks as JSON text: what tables hold of them.

Deltas carry metadata as a msgpack map of plain values, and messages their headers; a table says
both in JSON, so that every engine can query them. Names keep their order. What JSON does not have
is written so:

    bytes                       {"base64": "…"}
    a float that is not finite  null
    msgpack's timestamps        text, ISO 8601; other extension types {"ext": 7, "base64": "…"}
    a name that is no text      its own JSON text; one that is bytes: as text, or in base64
    what is no map at all       {"penstock-unreadable": "why"}

A log may be older than the rule for its values: the last three are for those. Nothing that is
stored makes this fail, and the same bytes give the same text.

JSON is *exact* where the very bytes can be made of it again (`packed_of`). It is not where there is
one of the above, or where a writer chose another of msgpack's forms for a number than the shortest;
the tables keep the message itself for those rows.
"""

from __future__ import annotations

import base64
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.model.columns import Binary
from penstock.model.plain import SHOWN_DEPTH_MAX, TOO_DEEP, UNREADABLE, fault_of, readable
from penstock.sinks import arrays

_LEVELS: Final = 6  # of nested maps and arrays that are converted quickly


def _nested(levels: int) -> Any:
    scalar = bool | int | float | str | None
    kind: Any = scalar
    for _ in range(levels - 1):
        kind = scalar | list[kind] | dict[str, kind]
    return dict[str, kind]


# What nearly all maps are: no bytes, nothing deeper. Such a map is JSON as it is.
_QUICK: Final = msgspec.msgpack.Decoder(_nested(_LEVELS))
_MAP: Final = msgspec.json.Decoder(dict[str, Any])
_encode: Final = msgspec.json.Encoder().encode
_encode_sorted: Final = msgspec.json.Encoder(order="sorted").encode
_pack: Final = msgspec.msgpack.Encoder().encode
_UNREAD: Final = (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError,
                  MemoryError)  # fmt: skip
_ESCAPED: Final = 6  # the most bytes that JSON makes of one


def json_of(data: bytes) -> bytes:
    """A msgpack map as JSON text."""
    try:
        return _encode(_QUICK.decode(data))
    except _UNREAD:
        return _encode(_any(data))


def packed_of(text: str | bytes) -> bytes:
    """The msgpack map that JSON text says: of an exact one the bytes that it was made of."""
    return _pack(msgspec.json.decode(text))


def is_exact(data: bytes, text: bytes) -> bool:
    return packed_of(text) == data


def map_of(text: str | bytes | None) -> dict[str, Any] | None:
    return None if text is None else _MAP.decode(text)


def sorted_of(text: str) -> bytes:
    """The same for texts that say the same; what is no JSON stays as it is."""
    try:
        return _encode_sorted(msgspec.json.decode(text))
    except (msgspec.DecodeError, ValueError, RecursionError):
        return text.encode()


def _any(data: bytes) -> dict[str, Any]:
    try:
        found = msgspec.msgpack.decode(data)
        said = _said(found, 0)
        _encode(said)
    except _UNREAD:
        said = None
    if isinstance(said, dict):
        return said
    fault = fault_of(data, values_max=len(data))
    return {UNREADABLE: "it cannot be shown" if fault is None else fault.text}


def _said(value: Any, depth: int) -> Any:
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if depth >= SHOWN_DEPTH_MAX:
        return TOO_DEEP
    if isinstance(value, dict):
        return {_name(key): _said(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_said(item, depth + 1) for item in value]
    if isinstance(value, msgspec.msgpack.Ext):
        return {"ext": value.code, "base64": base64.b64encode(value.data).decode()}
    return value


def _name(key: Any) -> str:
    if isinstance(key, str):
        return key
    return readable(key)[0] if isinstance(key, bytes) else _encode(_said(key, 0)).decode()


# --- columns ---


def json_column(packed: pa.Array) -> pa.Array:
    """msgpack maps as JSON texts; null stays null."""
    if packed.null_count == len(packed):
        return pa.nulls(len(packed), pa.utf8())
    distinct, texts = _distinct(packed)
    return _utf8(texts).take(distinct.indices)


def judged_column(packed: pa.Array) -> tuple[pa.Array, NDArray[np.bool_]]:
    """The same, and which of the rows it does not say exactly."""
    inexact = np.zeros(len(packed), np.bool_)
    if packed.null_count == len(packed):
        return pa.nulls(len(packed), pa.utf8()), inexact
    distinct, texts = _distinct(packed)
    pairs = zip(distinct.dictionary.to_pylist(), texts, strict=True)
    numbers = [number for number, pair in enumerate(pairs) if not is_exact(*pair)]
    if numbers:
        found = pc.is_in(distinct.indices, value_set=pa.array(numbers, distinct.indices.type))
        inexact = found.to_numpy(zero_copy_only=False)
    return _utf8(texts).take(distinct.indices), inexact


def packed_column(texts: pa.Array) -> pa.Array:
    """JSON texts as msgpack maps; null stays null."""
    distinct = texts.dictionary_encode()
    maps = [packed_of(text) for text in distinct.dictionary.to_pylist()]
    return pa.array(maps, pa.binary()).take(distinct.indices)


def _distinct(packed: pa.Array) -> tuple[pa.DictionaryArray, list[bytes]]:
    """Maps that are equal are converted once."""
    distinct = packed.dictionary_encode()
    return distinct, [json_of(data) for data in distinct.dictionary.to_pylist()]


def _utf8(texts: list[bytes]) -> pa.Array:
    values = Binary.of(texts)
    return arrays.ragged(values.offsets, values.blob, pa.utf8())


def clock_column(
    offsets: NDArray[Any], origins: NDArray[Any], counters: NDArray[np.uint64]
) -> pa.Array:
    """Clocks as JSON objects. Written as a matrix of bytes of which each entry takes its own:

    { or , | " | origin | ": | digits of the counter | } (last entry of a clock only)
    """
    count, sizes = len(counters), np.diff(offsets)
    ends = np.asarray(offsets[1:], np.int64)[sizes > 0]
    names, lengths = _escaped(arrays.sixteen(origins))
    digits, used = _digits(counters)
    colon = 2 + names.shape[1]
    matrix = np.empty((count, colon + 3 + digits.shape[1]), np.uint8)
    mask = np.ones(matrix.shape, np.bool_)
    matrix[:, 0] = ord(",")
    matrix[np.asarray(offsets[:-1], np.int64)[sizes > 0], 0] = ord("{")
    matrix[:, 1] = matrix[:, colon] = ord('"')
    matrix[:, 2:colon] = names
    mask[:, 2:colon] = np.arange(names.shape[1]) < lengths[:, None]
    matrix[:, colon + 1] = ord(":")
    matrix[:, colon + 2 : -1] = digits
    mask[:, colon + 2 : -1] = used
    matrix[:, -1] = ord("}")
    mask[:, -1] = False
    mask[ends - 1, -1] = True
    starts, blob = arrays.masked(matrix, mask)
    column = arrays.ragged(starts[np.asarray(offsets, np.int64)], blob, pa.utf8())
    return column if sizes.all() else pc.if_else(pa.array(sizes > 0), column, "{}")


def _escaped(names: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Origins as they stand between quotes, padded, and the length of each."""
    lengths = (names != 0).sum(axis=1)  # without the zeros that pad them
    special = (names == ord('"')) | (names == ord("\\")) | ((names - 1) < 31)
    rows = np.flatnonzero(special.any(axis=1))
    if not len(rows):
        return names, lengths
    wide = np.zeros((len(names), names.shape[1] * _ESCAPED), np.uint8)
    wide[:, : names.shape[1]] = names
    for row in rows.tolist():
        text = names[row].tobytes().rstrip(b"\0").decode(errors="replace")
        said = np.frombuffer(_encode(text)[1:-1], np.uint8)
        wide[row, : len(said)], lengths[row] = said, len(said)
    return wide, lengths


def _digits(counters: NDArray[np.uint64]) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """The decimal digits of each number, and which of them are not zeros in front."""
    width = len(str(int(counters.max(initial=0))))
    digits = np.empty((len(counters), width), np.uint8)
    used = np.ones(digits.shape, np.bool_)
    left = np.asarray(counters, np.uint64)
    for at in reversed(range(width)):
        digits[:, at] = left % 10 + ord("0")
        left = left // 10
        if at:
            used[:, at - 1] = left > 0
    return digits, used
