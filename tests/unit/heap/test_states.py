from penstock.heap.states import ALIVE, ALLOWED, FOLLOWS, State, mask_of


def test_every_state_says_what_follows_it() -> None:
    assert FOLLOWS.keys() == set(State)


def test_allowed_is_the_same_table_by_target() -> None:
    for start in State:
        for to in State:
            assert ALLOWED[to][start] == (to in FOLLOWS[start])


def test_nothing_leads_out_of_done_or_back_to_none() -> None:
    assert not FOLLOWS[State.DONE]
    assert all(State.NONE not in after for after in FOLLOWS.values())


def test_every_living_state_can_end() -> None:
    assert all(State.DONE in FOLLOWS[state] for state in ALIVE)


def test_mask_is_a_lookup() -> None:
    mask = mask_of(ALIVE)
    assert [bool(mask[state]) for state in State] == [state in ALIVE for state in State]
