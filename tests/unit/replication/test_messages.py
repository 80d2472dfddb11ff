from typing import get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.replication import effects
from penstock.replication.effects import (
    EPOCH_MAX,
    Count,
    CreditWindow,
    Epoch,
    Fenced,
    Followed,
    PeerMessage,
)
from penstock.replication.rules import End

KINDS = [
    kind
    for kind in vars(effects).values()
    if isinstance(kind, type) and issubclass(kind, PeerMessage) and kind is not PeerMessage
]

EPOCH, NUMBER = st.integers(0, EPOCH_MAX), st.integers(0, 2**63 - 1)
VALUES = {
    str: st.text(max_size=40),
    Epoch: EPOCH,
    Count: NUMBER,
    CreditWindow: st.integers(1, 2**63 - 1),
    bool: st.booleans(),
    list[tuple[Epoch, Count]]: st.lists(st.tuples(EPOCH, NUMBER), max_size=3),
}


@given(st.data(), st.sampled_from(KINDS))
def test_what_is_sent_is_what_arrives(data: st.DataObject, kind: type[PeerMessage]) -> None:
    fields = {
        name: VALUES[hint] for name, hint in get_type_hints(kind, include_extras=True).items()
    }
    message = data.draw(st.builds(kind, **fields))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind) == message


@pytest.mark.parametrize("epoch", [-1, EPOCH_MAX + 1, 2**64 - 1])
def test_an_epoch_that_no_log_could_hold_does_not_arrive(epoch: int) -> None:
    packed = msgspec.msgpack.encode(effects.Fence("a", epoch))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(packed, type=effects.Fence)


@pytest.mark.parametrize("kind", KINDS)
def test_the_sender_comes_first(kind: type[PeerMessage]) -> None:
    assert kind.__struct_fields__[0] == "node"


def test_fields_that_an_older_node_does_not_send_have_defaults() -> None:
    old = msgspec.msgpack.encode(["a", 1, 2, 3, 4])
    assert msgspec.msgpack.decode(old, type=Followed) == Followed("a", 1, 2, 3, 4)


def test_a_promise_tells_where_the_log_ends() -> None:
    assert Fenced("a", "disk", 3, 2, 9, 5).end == End(2, 9)
