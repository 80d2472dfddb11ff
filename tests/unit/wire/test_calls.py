"""The table of calls, and what nodes and clients make of it."""

import msgspec

from penstock.node.calls.table import METHODS
from penstock.node.session import session  # noqa: F401 - it has all calls registered
from penstock.wire.messages import CALLS, is_repeatable


def test_the_table_has_every_call_of_a_node() -> None:
    assert CALLS.keys() == METHODS.keys()


def test_a_call_takes_a_token_if_it_needs_one() -> None:
    takes = {
        name
        for name, method in METHODS.items()
        if {"force", "confirm"} <= {f.name for f in msgspec.structs.fields(method.arguments)}
    }
    assert takes == {name for name, traits in CALLS.items() if traits.confirmed}


def test_nothing_that_destroys_or_leases_is_repeated() -> None:
    harmful = {name for name, traits in CALLS.items() if traits.confirmed} | {"pop", "key_create"}
    assert not [name for name in harmful if is_repeatable(name, {})]


def test_a_topic_is_created_twice_only_if_it_may_exist() -> None:
    assert is_repeatable("topic_create", {"exists_ok": True})
    assert not is_repeatable("topic_create", {})
