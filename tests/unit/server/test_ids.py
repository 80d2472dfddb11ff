from penstock.model.ids import MessageId
from penstock.server.ids import written_ids
from penstock.wire.messages import Duplicate, Enqueued, Placed


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
