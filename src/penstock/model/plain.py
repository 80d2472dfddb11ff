"""Maps of plain values as msgpack: the headers of a message, the metadata of a delta.

Plain are nil, booleans, integers, floats, text, bytes, arrays of plain values and maps from text to
plain values. Extension types are not, and so neither are msgpack's timestamps. Nothing nests deeper
than `DEPTH_MAX`, and there are at most so many values, counted at all levels: then any reader can
decode the map, whatever its language and however deep its own stack is.

`fault_of` is the definition. It neither recurses nor allocates by what a length claims, and stops
at the first fault. What enters a node is held against it, and so is what leaves one again: a log
may be older than the check.

`plain` shows such values as JSON can carry them. What msgpack has and JSON has not is written as
something that a reader can use: bytes that are text as text, other bytes in base64 under
`<name>_base64`, and nothing by what Python happens to print. Stored values may be of any depth.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

if TYPE_CHECKING:  # the command line shows plain values too, and starts without numpy
    from penstock.model.columns import Binary

DEPTH_MAX: Final = 16  # maps and arrays inside each other, the outermost map included
HEADERS_VALUES_MAX: Final = 1024  # counted at all levels
METADATA_VALUES_MAX: Final = 10_000
UNREADABLE: Final = "penstock-unreadable"  # a header that stands for headers that cannot be read
SHOWN_DEPTH_MAX: Final = 64  # levels that `plain` shows
TOO_DEEP: Final = "nested too deeply to be shown"
BUFFERS: Final = (bytes, bytearray, memoryview)
_Scalar = bool | int | float | str | None
# What nearly all maps are. It accepts less than `_scanned` and is many times as fast.
_FLAT: Final = msgspec.msgpack.Decoder(dict[str, _Scalar | list[_Scalar] | dict[str, _Scalar]])
_ANY: Final = msgspec.msgpack.Decoder(dict[str, Any])


class Fault(NamedTuple):
    """Why bytes are not a map of plain values; `limit` is the one that they exceed, if any."""

    text: str
    limit: int | None = None


# What a value is. Plain numbers: an enum would double the time that a scan takes.
_SCALAR, _TEXT, _BYTES, _ARRAY, _MAP, _EXTENSION, _INVALID = range(7)


class _Opcode(NamedTuple):
    kind: int
    width: int  # bytes of the length that follows
    size: int  # bytes or items, where no length follows


def _opcode(byte: int) -> _Opcode:
    """What msgpack says about a value that begins with `byte`."""
    if byte < 0x80 or byte >= 0xE0:
        return _Opcode(_SCALAR, 0, 0)
    if byte < 0x90:
        return _Opcode(_MAP, 0, byte & 0x0F)
    if byte < 0xA0:
        return _Opcode(_ARRAY, 0, byte & 0x0F)
    if byte < 0xC0:
        return _Opcode(_TEXT, 0, byte & 0x1F)
    return _LONGER.get(byte, _Opcode(_EXTENSION, 0, 0))


_LONGER: Final = {
    0xC0: _Opcode(_SCALAR, 0, 0),
    0xC1: _Opcode(_INVALID, 0, 0),
    0xC2: _Opcode(_SCALAR, 0, 0),
    0xC3: _Opcode(_SCALAR, 0, 0),
    **{0xC4 + i: _Opcode(_BYTES, 1 << i, 0) for i in range(3)},
    0xCA: _Opcode(_SCALAR, 0, 4),
    0xCB: _Opcode(_SCALAR, 0, 8),
    **{0xCC + i: _Opcode(_SCALAR, 0, 1 << i) for i in range(4)},
    **{0xD0 + i: _Opcode(_SCALAR, 0, 1 << i) for i in range(4)},
    **{0xD9 + i: _Opcode(_TEXT, 1 << i, 0) for i in range(3)},
    **{0xDC + i: _Opcode(_ARRAY, 2 << i, 0) for i in range(2)},
    **{0xDE + i: _Opcode(_MAP, 2 << i, 0) for i in range(2)},
}
_OPCODES: Final = tuple(map(_opcode, range(256)))
_CUT_SHORT: Final = Fault("it is cut short")


def fault_of(data: bytes, *, values_max: int = HEADERS_VALUES_MAX) -> Fault | None:
    """Why `data` is not a map of plain values; None: it is one. No bytes stand for no map."""
    if not data:
        return None
    try:
        flat = _FLAT.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _scanned(data, values_max)
    if len(data) <= values_max:  # a value takes a byte at least
        return None
    inner = sum(len(value) for value in flat.values() if isinstance(value, list | dict))
    return _too_many(values_max) if len(flat) + inner > values_max else None


def _scanned(data: bytes, values_max: int) -> Fault | None:
    """The same for what the quick decoder refuses: value by value, without recursion."""
    if _OPCODES[data[0]].kind != _MAP:
        return Fault("it is not a map")
    at, end, values = 0, len(data), -1  # the map itself is no value of it
    # Items that are still to come in what is open: of the innermost, and of those round it.
    left, in_map = 1, False
    outer: list[tuple[int, bool]] = []
    while True:
        while not left:
            left, in_map = outer.pop()
            if not outer:
                return Fault("bytes follow it") if at != end else None
        left -= 1
        if at >= end:
            return _CUT_SHORT
        kind, width, size = _OPCODES[data[at]]
        at += 1
        if width:
            size = int.from_bytes(data[at : at + width], "big")
            at += width
            if at > end:
                return _CUT_SHORT
        if in_map and left % 2:
            if kind != _TEXT:
                return Fault("a name in it is no text")
        else:
            values += 1
            if values > values_max:
                return _too_many(values_max)
        if kind in (_MAP, _ARRAY):
            if len(outer) >= DEPTH_MAX:
                return Fault(f"it nests more than {DEPTH_MAX} deep", DEPTH_MAX)
            outer.append((left, in_map))
            left, in_map = (2 * size, True) if kind == _MAP else (size, False)
            if left > end - at:
                return _CUT_SHORT
        elif size or kind > _MAP:
            fault = _leaf_fault(kind, data[at : at + size], size)
            if fault is not None:
                return fault
            at += size


def _leaf_fault(kind: int, content: bytes, size: int) -> Fault | None:
    if kind == _EXTENSION:
        return Fault("a value in it has an extension type")
    if kind == _INVALID:
        return Fault("it is not msgpack")
    if len(content) < size:
        return _CUT_SHORT
    if kind == _TEXT:
        try:
            content.decode()
        except UnicodeDecodeError:
            return Fault("a text in it is not UTF-8")
    return None


def _too_many(values_max: int) -> Fault:
    return Fault(f"it has more than {values_max} values", values_max)


def fault_in(column: Binary) -> tuple[int, Fault] | None:
    """The first row of a column that is no map of plain values, and why. Maps that are equal, as
    those of one producer often are, are looked at once."""
    first, count = column[0] if len(column) else b"", len(column)
    if len(first) * count == len(column.blob) and first * count == bytes(column.blob):
        fault = fault_of(first)
        return None if fault is None else (0, fault)
    return next(iter(faults_of(column.tolist()).items()), None)


def faults_of(values: Sequence[bytes]) -> dict[int, Fault]:
    """By row, why a value is no map of plain values."""
    found = {value: fault_of(value) for value in set(values)}
    return {row: fault for row, value in enumerate(values) if (fault := found[value]) is not None}


def headers_of(data: bytes) -> dict[str, Any]:
    """Headers to be shown: those that cannot be read are replaced by one that says why."""
    if not data:
        return {}
    fault = fault_of(data)
    return _ANY.decode(data) if fault is None else {UNREADABLE: fault.text}


# --- values as JSON can carry them ---


def plain(value: Any, *, depth: int = 0) -> Any:
    """The value in JSON's own types; what is of neither msgpack nor JSON stays as it is."""
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, BUFFERS):
        return readable(bytes(value))[0]
    if depth >= SHOWN_DEPTH_MAX:
        return TOO_DEEP
    if isinstance(value, dict):
        return plain_map(value, depth=depth + 1)
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item, depth=depth + 1) for item in value]
    if isinstance(value, msgspec.msgpack.Ext):
        return {"ext": value.code, "data_base64": base64.b64encode(value.data).decode()}
    return value


def plain_map(values: dict[Any, Any], *, depth: int = 0) -> dict[str, Any]:
    pairs: dict[str, Any] = {}
    for key, item in values.items():
        name = key if isinstance(key, str) else _name(key)
        if isinstance(item, BUFFERS):
            shown, text = readable(bytes(item))
            pairs[name if text else f"{name}_base64"] = shown
        else:
            pairs[name] = plain(item, depth=depth)
    return pairs


def readable(data: bytes) -> tuple[str, bool]:
    """The bytes as text and True, or in base64 and False if they are no text."""
    try:
        return data.decode(), True
    except UnicodeDecodeError:
        return base64.b64encode(data).decode(), False


def _name(key: Any) -> str:
    """A key that is no text: bytes and numbers keep their own writing, the others JSON's."""
    if isinstance(key, BUFFERS):
        return readable(bytes(key))[0]
    return msgspec.json.encode(plain(key), enc_hook=str).decode()
