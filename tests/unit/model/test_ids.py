from hypothesis import given
from hypothesis import strategies as st

from penstock.model.ids import MessageId, message_ids


@given(
    time_ms=st.integers(0, (1 << 48) - 1),
    topic=st.integers(0, 0xFFFF),
    partition=st.integers(0, 1023),
    first=st.integers(1, 1 << 47),
    count=st.integers(0, 3000),
)
def test_many_ids_equal_one_by_one(
    time_ms: int, topic: int, partition: int, first: int, count: int
) -> None:
    sequences = range(first, first + count)
    texts = message_ids(time_ms, topic, partition, sequences)
    assert len(texts) == count
    for at in {0, count // 2, count - 1} if count else ():
        assert texts[at] == str(MessageId(time_ms, topic, partition, sequences[at]))
