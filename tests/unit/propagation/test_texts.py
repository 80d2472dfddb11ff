import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.propagation.texts import Texts

texts = st.lists(st.binary(max_size=9), max_size=20)


@given(texts, texts, st.data())
def test_texts_are_picked_by_number(
    one: list[bytes], two: list[bytes], data: st.DataObject
) -> None:
    kept, everything = Texts(), one + two
    kept.extend(one)
    kept.extend(two)
    numbers = data.draw(st.lists(st.sampled_from(range(len(everything))))) if everything else []
    assert kept.take(np.array(numbers, np.int64)).tolist() == [everything[n] for n in numbers]
    assert [kept[n] for n in range(len(kept))] == everything
    assert kept.joined().tobytes() == b"".join(everything)


def test_the_arena_grows() -> None:
    kept = Texts()
    for i in range(20):
        kept.extend([bytes([i]) * 10_000])
    assert kept[19] == bytes([19]) * 10_000 and kept[0] == bytes(10_000)
