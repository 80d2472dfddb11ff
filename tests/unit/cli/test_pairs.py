import pytest

from penstock.cli.pairs import pairs_of, values_of
from penstock.errors import InvalidArgument


def test_values_are_read_as_json_where_they_are_json() -> None:
    read = values_of(["k=5", "paused=true", "mode=max", "name=a=b"], option="set")
    assert read == {"k": 5, "paused": True, "mode": "max", "name": "a=b"}


def test_pairs_stay_text() -> None:
    assert pairs_of(["n=5"], option="header") == {"n": "5"}
    assert pairs_of(None, option="header") == {}


@pytest.mark.parametrize("text", ["novalue", "=5", ""])
def test_a_pair_without_a_name_or_sign_names_the_option(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        pairs_of([text], option="header")
    assert caught.value.field == "header"
