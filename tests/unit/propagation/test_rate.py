import pytest

from penstock.errors import InvalidArgument
from penstock.propagation.rate import AdaptiveRate


@pytest.mark.parametrize(
    ("utilisation", "expected"), [(0.95, 500), (0.8, 900), (0.5, 1000), (0.2, 1100), (7.0, 500)]
)
def test_the_rate_follows_utilisation(utilisation: float, expected: float) -> None:
    rate = AdaptiveRate(initial=1000, minimum=1, maximum=9999, alpha=1.0)
    assert rate.adjust(utilisation) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("utilisation", "expected"), [(0.95, 500), (0.8, 900), (0.6, 1000), (0.4, 1100)]
)
def test_what_it_alone_holds_back_raises_it_earlier(utilisation: float, expected: float) -> None:
    rate = AdaptiveRate(initial=1000, minimum=1, maximum=9999, alpha=1.0)
    assert rate.adjust(utilisation, held=True) == pytest.approx(expected)


def test_alpha_takes_a_part_of_the_step() -> None:
    rate = AdaptiveRate(initial=1000, minimum=1, maximum=9999, alpha=0.25)
    assert rate.adjust(1.0) == pytest.approx(875)


def test_the_rate_stays_within_its_bounds() -> None:
    rate = AdaptiveRate(initial=100, minimum=90, maximum=110)
    for utilisation in [1.0] * 50 + [0.0] * 50:
        rate.adjust(utilisation)
        rate.validate()
    assert rate.rate == pytest.approx(110)


@pytest.mark.parametrize(
    ("bad", "field"),
    [({"initial": 0}, "initial"), ({"minimum": 0}, "minimum"), ({"alpha": 0}, "alpha"),
     ({"maximum": 1}, "minimum")],
)  # fmt: skip
def test_settings_have_bounds(bad: dict[str, float], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        AdaptiveRate(**{"initial": 10, "minimum": 5, "maximum": 20, **bad})
    assert caught.value.field == field


def test_utilisation_is_a_number() -> None:
    with pytest.raises(InvalidArgument):
        AdaptiveRate(initial=10, minimum=5, maximum=20).adjust(float("nan"))
