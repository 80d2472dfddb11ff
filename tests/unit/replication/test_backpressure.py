from tests.unit.replication.parts import batch, disk, follow_and_hold, serving

from penstock.errors import Backpressure
from penstock.replication.effects import Ack
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


def stuck_but_alive(machine: Replica, node: str, now: int) -> None:
    """A follower that is heard of and gives no credit back."""
    machine.on_ack(Ack(node, disk(node), 1, 1, 1, 1, 1, 1), now)


def test_a_follower_whose_disk_does_not_count_takes_nothing_for_the_writers() -> None:
    machine = serving()
    send_window(machine, 100)
    follow_and_hold(machine, "c", uuid="another-disk", stream=2)
    stuck_but_alive(machine, "b", 1200)
    assert machine.coordinator.senders["c"].exhausted_ms is None
    assert isinstance(machine.writable(1200), Backpressure)


def test_a_silent_follower_with_credit_left_takes_nothing_for_the_writers() -> None:
    machine = serving()
    silent_from = machine.options.silence_ms + 1
    last = machine.log.last + WINDOW
    machine.on_staged(batch(machine.log.last + 1, epoch=1, count=WINDOW))
    machine.on_sent("b", last, entries=WINDOW, bytes=1, now=100)  # nothing to c, heard at 0
    stuck_but_alive(machine, "b", silent_from)
    assert isinstance(machine.writable(silent_from), Backpressure)
    receive(machine, "b", silent_from)
    assert machine.writable(silent_from) is None
