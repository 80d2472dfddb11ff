"""The segments of a log, and which of the sealed ones are open."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Final

from penstock.errors import Corruption, NotFound
from penstock.log.files import Handle
from penstock.log.index import Opened
from penstock.log.layout import FOOTER_SIZE
from penstock.log.segment import Segment, load_index

OPEN_MAX: Final = 16  # sealed segments of one log whose files are open


class SegmentTable:
    """Segments in order. Changes replace the whole view, so a reader needs no lock.

    Files and indexes of sealed segments are opened on demand and closed least recently used first,
    within `index_bytes` and `OPEN_MAX`.
    """

    def __init__(self, *, index_bytes: int) -> None:
        self._index_bytes = index_bytes
        self._lock = Lock()
        self._closed = False
        self._empty_at = 1  # where the log begins while there is no segment
        self._open: OrderedDict[Segment, None] = OrderedDict()
        self._latest: Segment | None = None  # the last of `_open`
        self._publish([])

    def restart(self, segments: list[Segment], *, empty_at: int) -> None:
        """Have these segments and no others."""
        with self._lock:
            self._empty_at = empty_at
            self._publish(segments)
            kept = [segment for segment in self._open if segment in segments]
            self._open = OrderedDict.fromkeys(kept)
            self._latest = None

    def segments(self) -> list[Segment]:
        return self._view[1]

    @property
    def first(self) -> int:
        firsts, _ = self._view
        return firsts[0] if firsts else self._empty_at

    @property
    def bytes(self) -> int:
        _, segments = self._view
        return self._bytes_before + segments[-1].bytes if segments else 0

    def find(self, sequence: int) -> Segment:
        """The segment that covers `sequence`; the caller has checked the log's bounds."""
        firsts, segments = self._view
        position = bisect_right(firsts, sequence) - 1
        if position < 0:
            raise NotFound(f"sequence {sequence} is no longer held", sequence=sequence)
        return segments[position]

    def append(self, segment: Segment) -> None:
        with self._lock:
            self._publish([*self._view[1], segment])

    def replace(self, old: Segment, new: Segment, *, commit: Callable[[], object]) -> None:
        """Put `new` in the place of `old`; `commit` puts its file there, in one step."""
        with self._lock:
            commit()
            self._publish([new if segment is old else segment for segment in self._view[1]])
            self._open.pop(old, None)
            self._admit(new)

    def drop(self, gone: list[Segment]) -> None:
        with self._lock:
            self._publish([segment for segment in self._view[1] if segment not in gone])
            for segment in gone:
                self._open.pop(segment, None)
            self._latest = None

    def locate(self, sequence: int, *, nowait: bool) -> tuple[Segment, Opened | None]:
        """The segment of `sequence` and its file and index: None if `nowait` and not at hand."""
        segment = self.find(sequence)
        opened = segment.opened
        while opened is None and not nowait:
            opened = self._load(segment)
            if opened is None:
                segment = self.find(sequence)
                opened = segment.opened
            else:
                segment.opened = opened
        if segment.sealed and opened is not None:
            self.touch(segment)
        return segment, opened

    def _load(self, segment: Segment) -> Opened | None:
        """Open exactly this segment; None once it is another one's place."""
        handle = self.open_file(segment)
        if handle is None:
            return None
        try:
            return Opened(handle, load_index(segment, handle))
        except Corruption:
            if segment in self._view[1]:
                raise
            return None  # it was cut meanwhile

    def open_file(self, segment: Segment) -> Handle | None:
        """The file of exactly this segment; None once it was dropped, cut or rewritten. Raises
        `NotFound` once the log is closed."""
        with self._lock:  # not while a rewrite swaps the file
            if self._closed:
                raise NotFound("the log is closed")
            return Handle(segment.path) if segment in self._view[1] else None

    def close(self) -> None:
        """No file is opened any more: under the same names there may soon be others."""
        with self._lock:
            self._closed = True
            for segment in self._view[1]:
                segment.opened = None

    def touch(self, segment: Segment) -> None:
        """Note that an open, sealed segment was just used; it may close others."""
        if segment is not self._latest:
            with self._lock:
                self._admit(segment)

    def _admit(self, segment: Segment) -> None:
        self._latest = segment
        self._open[segment] = None
        self._open.move_to_end(segment)
        total = sum(s.opened.index.bytes for s in self._open if s.opened is not None)
        while len(self._open) > 1 and (total > self._index_bytes or len(self._open) > OPEN_MAX):
            oldest, _ = self._open.popitem(last=False)
            if oldest.opened is not None:
                total -= oldest.opened.index.bytes
                oldest.opened = None

    def _publish(self, segments: list[Segment]) -> None:
        self._view = ([segment.first for segment in segments], segments)
        # All but the newest are sealed, or will be as soon as the writer gets there.
        self._bytes_before = sum(segment.end + FOOTER_SIZE for segment in segments[:-1])
