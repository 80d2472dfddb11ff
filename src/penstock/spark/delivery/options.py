"""How sinks are served: bounds of a write, patience with failures, how often to tell."""

from __future__ import annotations

from penstock.errors import InvalidArgument
from penstock.sinks.retrying import Patience


class DeliveryOptions(Patience, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rows_per_write_max: int = 100_000  # a trigger with more goes to an ordered sink whole
    bytes_per_write_max: int = 256 << 20
    rows_together_max: int = 10_000  # so few waiting rows are not worth a write for each lane
    hang_s: float = 60.0  # a call of a sink that takes longer is shown as hanging
    status_s: float = 1.0  # between two writings of status.json
    poll_s: float = 1.0  # an idle sink looks round this often, even if nobody wakes it

    def validate(self) -> DeliveryOptions:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise InvalidArgument(f"{name} must be greater than 0", field=name, limit=0)
        return self
