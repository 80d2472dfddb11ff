"""Routes on change files: a sink gets what matches, once."""

from pathlib import Path

import pytest
from tests.unit.spark.delivery.delivering import FileSink, Triggers, delivery_of

from penstock.errors import InvalidArgument
from penstock.model.delta import Op
from penstock.sinks.protocol import Feed
from penstock.spark.delivery.attachment import RoutedSink
from penstock.spark.delivery.selection import SinkRoutes


def delivered(tmp_path: Path, *routes: str, feed: Feed = Feed.STATES) -> FileSink:
    """What a sink with these routes holds after three triggers of different kinds."""
    triggers = Triggers(tmp_path)
    triggers.commit(("a", 1), ("b", 1), namespace="products")
    triggers.commit(("a", 2), namespace="products", headers={"team": "search"})
    triggers.commit(("a", 1), ("c", 1), namespace="users", op=Op.CREATE)
    sink = FileSink(tmp_path, feed=feed, ordered=feed is not Feed.STATES)
    attached = RoutedSink(sink=sink, routes=SinkRoutes.parse(routes))
    delivery = delivery_of(triggers, attached, folder=tmp_path)
    delivery.start()
    assert delivery.drain(20)
    delivery.stop()
    assert delivery.workers[0].cursor.through == 2
    return sink


@pytest.mark.parametrize(
    ("routes", "ordinals"),
    [
        ((), [1, 2, 3, 4, 5]),
        (("*", "op=delete"), [1, 2, 3, 4, 5]),
        (("namespace=products",), [1, 2, 3]),
        (("vector=products/a",), [1, 3]),
        (("op=create",), [4, 5]),
        (("header:team=search",), [3]),
        (("namespace=products", "vector=products/a", "op=dense"), [1, 2, 3]),
        (("op=delete",), []),
    ],
)
def test_deltas_that_match_come_once(
    tmp_path: Path, routes: tuple[str, ...], ordinals: list[int]
) -> None:
    assert delivered(tmp_path, *routes, feed=Feed.DELTAS).ordinals() == ordinals


@pytest.mark.parametrize(
    ("routes", "states"),
    [
        (("namespace=users",), {"a": 1, "c": 1}),
        (("vector=products/b",), {"b": 1}),
        (("op=create",), {"a": 1, "c": 1}),
        (("header:team=search",), {"a": 2}),
        (("header:team=search", "vector=users/c"), {"a": 2, "c": 1}),
        (("header:team=ads",), {}),
    ],
)
def test_states_are_those_that_a_matching_delta_touched(
    tmp_path: Path, routes: tuple[str, ...], states: dict[str, int]
) -> None:
    assert delivered(tmp_path, *routes).states() == states


def test_a_route_that_says_nothing_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="planet=mars"):
        SinkRoutes.parse(["planet=mars"])
