import math

import pytest

from penstock.client.options import Options
from penstock.errors import InvalidArgument


@pytest.mark.parametrize("attempt_s", [0.0, -1.0, math.inf, math.nan])
def test_an_attempt_takes_some_time_and_not_for_ever(attempt_s: float) -> None:
    with pytest.raises(InvalidArgument, match="attempt_s"):
        Options(attempt_s=attempt_s)
    assert Options(attempt_s=None).attempt_s is None
