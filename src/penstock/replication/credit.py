"""Credit: how much may be under way to one reader.

    room = window − (sent − received)

Both totals only ever grow. A replica's acknowledgement names the reader's total, so that one which
is lost, late or repeated does no harm; a subscriber gives back what it has handled since
(`give_back`), on a connection that loses nothing. The sender of a log keeps nothing queued: it
reads the log when there is room, so that a slow reader costs at most its window.
"""

from __future__ import annotations

from penstock.errors import InvalidArgument


class Credit:
    """The sender's account of one stream, in entries and in bytes."""

    __slots__ = (
        "bytes_received", "bytes_sent", "bytes_window", "entries_received", "entries_sent",
        "entries_window",
    )  # fmt: skip

    def __init__(self, *, entries: int, bytes: int) -> None:
        if entries < 1 or bytes < 1:
            raise ValueError("a window is at least 1")
        self.entries_window, self.bytes_window = entries, bytes
        self.entries_sent = self.bytes_sent = 0
        self.entries_received = self.bytes_received = 0

    @property
    def entries_out(self) -> int:
        return self.entries_sent - self.entries_received

    @property
    def bytes_out(self) -> int:
        return self.bytes_sent - self.bytes_received

    @property
    def entries(self) -> int:
        """Left to send. A lone batch larger than the window may overdraw it, never twice."""
        left = self.entries_window - self.entries_sent + self.entries_received
        return left if left > 0 else 0

    @property
    def bytes(self) -> int:
        """Left to send. While no entry is under way that is something, so that nobody waits for
        bytes that will not come back."""
        left = self.bytes_window - self.bytes_sent + self.bytes_received
        return left if left > 0 else int(self.entries_sent == self.entries_received)

    @property
    def exhausted(self) -> bool:
        # As `entries` and `bytes` say; asked for every reader at every step.
        return (
            self.entries_sent - self.entries_received >= self.entries_window
            or self.bytes_sent - self.bytes_received >= self.bytes_window
        )

    @property
    def share(self) -> float:
        """What is left of the window, of entries or bytes, whichever is less."""
        return min(self.entries / self.entries_window, self.bytes / self.bytes_window)

    @property
    def low(self) -> bool:
        return self.entries * 5 < self.entries_window or self.bytes * 5 < self.bytes_window

    @property
    def utilisation(self) -> float:
        """How much of the window is used, of entries or bytes, whichever is more; 1: all."""
        return max(self.entries_out / self.entries_window, self.bytes_out / self.bytes_window)

    def on_sent(self, entries: int, bytes: int) -> None:
        if self.exhausted:
            raise RuntimeError("sent without credit")
        self.use(entries, bytes)

    def use(self, entries: int, bytes: int) -> None:
        """Count what was sent, even if its frames came to more bytes than its rows."""
        self.entries_sent += entries
        self.bytes_sent += bytes

    def covers(self, entries: int, bytes: int) -> bool:
        return entries <= self.entries_sent and bytes <= self.bytes_sent

    def on_received(self, entries: int, bytes: int) -> None:
        """The reader has taken this much in all."""
        if not self.covers(entries, bytes):
            raise ValueError(f"{entries} entries received, {self.entries_sent} sent")
        self.entries_received = max(self.entries_received, entries)
        self.bytes_received = max(self.bytes_received, bytes)

    def give_back(self, entries: int, bytes: int) -> None:
        """The reader has handled this much more."""
        if not (0 <= entries <= self.entries_out and 0 <= bytes <= self.bytes_out):
            raise InvalidArgument("more credit returned than is out", field="entries")
        self.entries_received += entries
        self.bytes_received += bytes
