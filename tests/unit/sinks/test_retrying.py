"""How long a sink that failed is left alone."""

import pytest

from penstock.errors import InvalidArgument
from penstock.sinks.retrying import Retry
from penstock.spark.delivery.options import DeliveryOptions


def test_the_options_say_when_the_breaker_opens_and_for_how_long() -> None:
    retry = Retry(DeliveryOptions(breaker_failures=3, breaker_open_s=4.0, backoff_s_base=0.01))
    assert [retry.failed(now=float(at)) for at in range(3)] == [False, False, True]
    assert retry.describe(now=2.0)["retry_in_s"] == 4.0
    assert retry.delay_s(now=6.5) == 0.0
    assert retry.breaker_state == "half_open"
    retry.succeeded(now=6.6)
    assert (retry.breaker_state, retry.waiting) == ("closed", False)


def test_without_options_it_opens_at_the_tenth_failure_for_half_a_minute() -> None:
    retry = Retry(DeliveryOptions())
    assert [retry.failed(now=0.0) for _ in range(10)].index(True) == 9
    assert retry.describe(now=0.0)["retry_in_s"] == 30.0


@pytest.mark.parametrize("name", DeliveryOptions.__struct_fields__)
def test_no_option_may_be_nothing(name: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        DeliveryOptions(**{name: 0}).validate()
    assert refused.value.field == name
