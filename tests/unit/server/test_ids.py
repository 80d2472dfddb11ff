import pytest

from penstock.model.ids import MessageId
from penstock.server.ids import message_ids, written_ids
from penstock.wire.messages import Duplicate, Enqueued, Placed


@pytest.mark.parametrize("first", [1, 32_760, (1 << 30) - 3, (1 << 45) - 2, (1 << 48) - 11])
def test_ids_of_a_run_equal_ids_one_by_one(first: int) -> None:
    sequences = range(first, first + 10)
    made = message_ids(513, partition=1023, sequences=sequences, time_ms=1_790_000_000_123)
    assert made == [str(MessageId(1_790_000_000_123, 513, 1023, s)) for s in sequences]


def test_every_entry_gets_its_own_id_in_the_order_of_the_request() -> None:
    enqueued = Enqueued(
        7,
        [Placed(0, 2, 0, 5, 100), Placed(3, 1, 1, 9, 100)],
        [Duplicate(2, 1, 4, 50)],
    )
    ids, duplicates = written_ids(enqueued, 4)
    found = [MessageId.parse(text) for text in ids]
    assert [(m.partition, m.sequence) for m in found] == [(0, 5), (0, 6), (1, 4), (1, 9)]
    assert found[2].time_ms == 50
    assert duplicates == [2]
