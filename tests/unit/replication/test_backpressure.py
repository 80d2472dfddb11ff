from tests.unit.replication.parts import batch, disk, serving

from penstock.errors import Backpressure
from penstock.replication.messages import Ack
from penstock.replication.replica import Replica

WINDOW = 1000  # entries of credit that `serving` gives each follower


def send_window(machine: Replica, now: int) -> None:
    """Append a batch that uses up everybody's credit, and send it."""
    last = machine.log.last + WINDOW
    machine.on_staged(batch(machine.log.last + 1, epoch=1, count=WINDOW))
    for node in "bc":
        machine.on_sent(node, last, entries=WINDOW, bytes=1, now=now)


def receive(machine: Replica, nodes: str, now: int) -> None:
    for node in nodes:
        received = machine.coordinator.senders[node].credit
        machine.on_ack(
            Ack(node, disk(node), 1, 1, received.entries_sent, received.bytes_sent, 1, 1), now
        )


def test_batches_as_large_as_the_window_are_not_slowed_down() -> None:
    machine = serving()
    for now in range(0, 5000, 100):
        send_window(machine, now)
        machine.on_tick(now + 50)
        assert machine.writable(now + 50) is None
        receive(machine, "bc", now + 90)


def test_writers_are_told_when_a_majority_gives_nothing_back() -> None:
    machine = serving()
    send_window(machine, 100)
    receive(machine, "b", 200)
    assert machine.writable(1150) is None  # one of two followers is enough
    machine.on_staged(batch(machine.log.last + 1, epoch=1, count=WINDOW))
    machine.on_sent("b", machine.log.last, entries=WINDOW, bytes=1, now=200)
    assert machine.writable(1150) is None
    assert isinstance(machine.writable(1250), Backpressure)
    receive(machine, "b", 1300)
    assert machine.writable(1300) is None
