"""Two drivers of one pipeline, on every kind of store."""

from __future__ import annotations

import pytest

from penstock.errors import WrongEpoch
from penstock.spark.fold.state import ChangeLog, DriverClaim, Manifest
from penstock.spark.store import StoreAddress


def test_a_driver_that_sleeps_while_another_drives_does_no_harm(address: StoreAddress) -> None:
    sleeping = DriverClaim(address)
    zombie = ChangeLog(address.open(), claim=sleeping.number)
    sleeping.close()
    waking = DriverClaim(address)
    driver = ChangeLog(address.open(), claim=waking.number)
    for trigger in range(3):
        made = Manifest(trigger=trigger, claim=waking.number)
        assert driver.commit(made, check=waking.check) == made
    driver.prune(1)
    for _ in range(2):  # its number is free again, for it was pruned; nobody hears of it
        with pytest.raises(WrongEpoch, match="another driver"):
            zombie.commit(Manifest(trigger=0, claim=sleeping.number), check=sleeping.check)
    assert zombie.last is None
    again = ChangeLog(address.open())
    assert (again.first, again.last) == (2, 2)
