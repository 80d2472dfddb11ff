"""Every error Penstock raises, and the one table that maps them to gRPC and HTTP.

    PenstockError
    ├── CallerError                 the caller is wrong; the same call fails again
    │   ├── InvalidArgument         a field is malformed or over its limit
    │   ├── NotFound                no such topic, message, key or subscription
    │   ├── AlreadyExists           a topic of that name with another shape
    │   ├── Unauthenticated         no key, an unknown one, or a revoked one
    │   ├── Misdirected             the request is addressed to a name that is not the listener's
    │   ├── FailedPrecondition      the call needs something that is not so (a confirmation, a mode)
    │   ├── Unsupported             this implementation cannot do that at all
    │   └── SinkRejected            a sink can never take these rows; it took all the others
    ├── RetryableError              nothing is known to have happened; try again
    │   ├── Unavailable             the node starts, stops, or lost the connection
    │   │   └── QuorumUnavailable   no majority of replicas is alive
    │   └── Backpressure            a bound is reached; `retry_after_s` says when to come back
    │       ├── LimitExceeded       a per-topic, per-consumer or per-key bound
    │       └── DiskFull            no space for enqueues; acknowledgements still work
    ├── WorldMoved                  the caller's knowledge is out of date
    │   ├── LeaseLost               the token's lease expired or was settled
    │   ├── SequenceConflict        the partition is not at `expected_sequence`
    │   ├── RevisionConflict        a metadata entry was changed by another
    │   ├── StaleProducer           a newer epoch of this producer exists
    │   ├── WrongEpoch              the coordinator changed
    │   └── BatchAborted            an atomic batch was decided against
    └── Fatal                       stop; an operator is needed
        ├── Corruption              stored bytes are not what was written
        └── StorageFailed           a write or fsync failed; nothing further is acknowledged

A timeout means *unknown*, never *failed*: repeat the call with the same producer key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar


class PenstockError(Exception):
    """The root. `code` is stable and specific, `status` is one of the canonical eight."""

    code: ClassVar[str] = "internal"
    status: ClassVar[str] = "UNAVAILABLE"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = {name: value for name, value in details.items() if value is not None}

    def to_wire(self) -> dict[str, Any]:
        """The form in which every interface carries an error."""
        return {
            "code": self.code,
            "status": self.status,
            "message": self.message,
            "retryable": self.retryable,
            **self.details,
        }


class CallerError(PenstockError):
    """The caller is wrong."""


class InvalidArgument(CallerError):
    """A field is malformed or over its limit; `details` names both."""

    code = "invalid_argument"
    status = "INVALID_ARGUMENT"

    def __init__(self, message: str, *, field: str, limit: Any = None, **details: Any) -> None:
        super().__init__(message, field=field, limit=limit, **details)
        self.field = field
        self.limit = limit


class NotFound(CallerError):
    code = "not_found"
    status = "NOT_FOUND"


class AlreadyExists(CallerError):
    code = "already_exists"
    status = "FAILED_PRECONDITION"


class Unauthenticated(CallerError):
    code = "unauthenticated"
    status = "UNAUTHENTICATED"


class Misdirected(CallerError):
    """An HTTP request for another host. Only HTTP has it."""

    code = "misdirected"
    status = "MISDIRECTED"


class FailedPrecondition(CallerError):
    code = "failed_precondition"
    status = "FAILED_PRECONDITION"


class Unsupported(CallerError):
    code = "unsupported"
    status = "FAILED_PRECONDITION"


class SinkRejected(CallerError):
    """Rows that a sink can never take: `rows` counts within the work's `table`. Where the others
    are committed later, `receipt` is what they left."""

    code = "sink_rejected"
    status = "INVALID_ARGUMENT"

    def __init__(
        self,
        message: str,
        *,
        rows: Sequence[int] = (),
        table: str = "states",
        receipt: Any = None,
        **details: Any,
    ) -> None:
        super().__init__(message, rows=list(rows), table=table, **details)
        self.rows = list(rows)
        self.table = table
        self.receipt = receipt


class RetryableError(PenstockError):
    """Try again; with the same producer key where something may have been written."""

    retryable = True


class Unavailable(RetryableError):
    code = "unavailable"
    status = "UNAVAILABLE"


class QuorumUnavailable(Unavailable):
    code = "quorum_unavailable"


class Backpressure(RetryableError):
    code = "backpressure"
    status = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, *, retry_after_s: float = 0.1, **details: Any) -> None:
        super().__init__(message, retry_after_s=retry_after_s, **details)
        self.retry_after_s = retry_after_s


class LimitExceeded(Backpressure):
    code = "limit_exceeded"


class DiskFull(Backpressure):
    code = "disk_full"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, **details: Any) -> None:
        super().__init__(message, retry_after_s=retry_after_s, **details)


class WorldMoved(PenstockError):
    status = "FAILED_PRECONDITION"


class LeaseLost(WorldMoved):
    code = "lease_lost"


class SequenceConflict(WorldMoved):
    code = "sequence_conflict"
    status = "ABORTED"


class RevisionConflict(WorldMoved):
    """A compare-and-swap in the metadata store lost; read again and decide anew."""

    code = "revision_conflict"
    status = "ABORTED"


class StaleProducer(WorldMoved):
    code = "stale_producer"


class WrongEpoch(WorldMoved):
    code = "wrong_epoch"


class BatchAborted(WorldMoved):
    code = "batch_aborted"
    status = "ABORTED"
    retryable = True


class Fatal(PenstockError):
    """Stop; an operator is needed."""


class Corruption(Fatal):
    code = "corruption"


class StorageFailed(Fatal):
    code = "storage_failed"


# Canonical status -> (gRPC status code, HTTP status).
STATUS_TABLE: dict[str, tuple[int, int]] = {
    "INVALID_ARGUMENT": (3, 400),
    "NOT_FOUND": (5, 404),
    "RESOURCE_EXHAUSTED": (8, 429),
    "FAILED_PRECONDITION": (9, 412),
    "ABORTED": (10, 409),
    "UNAVAILABLE": (14, 503),
    "UNAUTHENTICATED": (16, 401),
    "MISDIRECTED": (9, 421),
}


def _concrete(root: type[PenstockError]) -> dict[str, type[PenstockError]]:
    found = {root.code: root} if "code" in vars(root) else {}
    for child in root.__subclasses__():
        found |= _concrete(child)
    return found


BY_CODE: dict[str, type[PenstockError]] = _concrete(PenstockError)


def from_wire(error: dict[str, Any]) -> PenstockError:
    """Rebuild the exception that `to_wire` described; an unknown code stays a PenstockError. Raises
    `Corruption` for what describes none."""
    fields = dict(error)
    code, message = fields.pop("code", ""), fields.pop("message", "unknown error")
    texts = isinstance(code, str) and isinstance(message, str)
    if not (texts and isinstance(fields.get("retry_after_s", 0.0), int | float)):
        raise Corruption("an error is not described as errors are")
    kind = BY_CODE.get(code, PenstockError)
    fields.pop("status", None)
    fields.pop("retryable", None)
    if issubclass(kind, InvalidArgument):
        fields.setdefault("field", "unknown")
    try:
        return kind(message, **fields)
    except TypeError as wrong:
        raise Corruption(f"an error is not described as errors are: {wrong}") from wrong
