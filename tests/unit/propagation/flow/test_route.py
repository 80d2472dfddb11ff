import msgspec
import numpy as np
import pytest
from tests.unit.propagation.world import World, batch_of

from penstock.errors import InvalidArgument
from penstock.model.columns import Binary
from penstock.model.delta import Op
from penstock.model.delta_batch import DeltaBatch
from penstock.propagation.flow.route import DeltaRoute, routed


def some() -> DeltaBatch:
    """n/v SPARSE, n/w DELETE, other/v SPARSE, with headers on the first and the last."""
    world = World()
    one = {"indices": np.array([0], np.uint16), "values": np.array([1.0], np.float32)}
    world.write("a", "v", Op.SPARSE, tick=1, **one)
    world.write("a", "w", Op.DELETE, tick=2)
    third = world.write("b", "v", Op.SPARSE, tick=3, **one)
    world.deltas[-1] = msgspec.structs.replace(third, namespace="other")
    batch = batch_of(world.deltas)
    headers = [msgspec.msgpack.encode({"team": "x"}), b"", b"\xc1 no msgpack"]
    return DeltaBatch.of(batch.payloads, headers=Binary.of(headers))


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ((), [True, True, True]),
        (("*",), [True, True, True]),
        (("vector=n/v",), [True, False, False]),
        (("namespace=n",), [True, True, False]),
        (("namespace=m",), [False, False, False]),
        (("op=delete",), [False, True, False]),
        (("header:team=x",), [True, False, False]),
        (("header:team=y",), [False, False, False]),
        (("vector=n/v", "op=SPARSE", "namespace=n"), [True, True, True]),
    ],
)
def test_routes_select_rows(texts: tuple[str, ...], expected: list[bool]) -> None:
    routes = [DeltaRoute.parse(text) for text in texts]
    assert routed(some(), routes).tolist() == expected


@pytest.mark.parametrize("text", ["*", "vector=n/a/b", "namespace=x=y", "op=SCALE", "header:a=b"])
def test_routes_have_a_text(text: str) -> None:
    assert str(DeltaRoute.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "all", "vector=n", "vector=/v", "op=nothing", "namespace=", "header:=x", "what=x"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="route"):
        DeltaRoute.parse(text)


def test_without_headers_no_header_matches() -> None:
    batch = some()
    plain = DeltaBatch.of(batch.payloads)
    assert not routed(plain, [DeltaRoute.parse("header:team=x")]).any()
