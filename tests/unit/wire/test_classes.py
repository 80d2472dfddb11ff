"""The priority class in a frame's flags."""

import pytest

from penstock.wire.frame import FrameFlag, class_of_flags, flags_of_class


@pytest.mark.parametrize("priority", [None, 0, 1, 2, 3])
def test_a_class_is_read_back(priority: int | None) -> None:
    flags = FrameFlag.BATCHED | flags_of_class(priority)
    assert class_of_flags(flags) == priority
    assert bool(flags & FrameFlag.HIGH) == (priority in (0, 1))
