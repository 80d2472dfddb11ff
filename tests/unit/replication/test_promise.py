from penstock.replication.effects import Persist
from penstock.replication.messages import Fence
from penstock.replication.promise import Promise


def test_a_promise_is_persisted_once() -> None:
    promise = Promise(1)
    assert promise.make(2) == [Persist(2)]
    assert promise.make(2) == []
    assert promise.make(1) == []


def test_lower_epochs_are_refused_before_the_promise_is_on_disk() -> None:
    promise = Promise(1)
    promise.make(3)
    assert not promise.accepts(2)
    assert promise.kept == 1


def test_a_fence_is_ready_when_its_promise_is_kept() -> None:
    promise = Promise(0)
    fence = Fence("a", 2)
    promise.on_fence(fence)
    assert promise.ready() == []
    promise.on_persisted(2)
    assert promise.ready() == [fence]
    assert promise.ready() == []


def test_an_older_write_that_ends_late_takes_nothing_back() -> None:
    promise = Promise(0)
    promise.on_persisted(3)
    promise.on_persisted(2)
    assert promise.kept == 3
