"""A state in files: who goes on with it, and what nobody goes on with."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from tests.unit.propagation.world import (
    DIMENSIONS,
    START_MS,
    Luck,
    batch_of,
    lucks,
    options,
    plain,
    run,
    sizes,
    story,
)

from penstock.propagation.fold import merge, registers
from penstock.propagation.fold.propagator import Propagator
from penstock.propagation.fold.snapshot import digest, dump, restore
from penstock.propagation.options import PropagationOptions
from penstock.spark.fold import local_state as module
from penstock.spark.fold.local_state import (
    LocalState,
    LocalStateLost,
    StateCache,
    executor_folder,
    local_state,
)

KEY = ("p", "t", 0)
OPTIONS = PropagationOptions()
CHILD = [sys.executable, "-m", "tests.unit.spark.fold.local_state_child"]


def history() -> list[int]:
    return list(range(0, 241, 40))


def log_of(seed: int = 11):
    return batch_of(Luck(seed).history(240))


def fold_in(local: LocalState, bounds: PropagationOptions = OPTIONS) -> Propagator:
    found = local.found()
    return found or Propagator(DIMENSIONS, bounds, space=local.fresh_space())


def step(root: Path, a: int, b: int, *, cache: StateCache | None = None) -> Propagator:
    with local_state(KEY, OPTIONS, cache={} if cache is None else cache, root=root) as local:
        fold = fold_in(local)
        assert fold.sequence == a
        run(fold, log_of(), [a, b])
        local.settle(fold)
    return fold


def step_that_fails(root: Path) -> None:
    with local_state(KEY, OPTIONS, cache={}, root=root) as local:
        run(fold_in(local), log_of(), [40, 80])
        raise AssertionError("nobody settles")


def found_in(root: Path) -> Propagator | None:
    with local_state(KEY, OPTIONS, cache={}, root=root) as local:
        found = local.found()
        if found is not None:
            local.settle(found)
        return found


def straight(through: int) -> int:
    fold = Propagator(DIMENSIONS)
    run(fold, log_of(), [0, through])
    return digest(fold)


def facts(root: Path) -> Path:
    return root / "p" / "t-0" / "facts"


# --- going on ---


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lucks, sizes)
def test_whoever_goes_on_has_the_same_future(
    tmp_path_factory: pytest.TempPathFactory, luck: Luck, size: int
) -> None:
    root = tmp_path_factory.mktemp("executor")
    arrivals = luck.arrivals(luck.history(size))
    times_ms = START_MS + np.cumsum([luck.randrange(40) for _ in arrivals])
    log = batch_of(arrivals, headers=luck.maybe(), times_ms=times_ms.tolist())
    bounds = options(
        operations_max=luck.randint(2, 5), pending_max=luck.randint(1, 5),
        dedup_ms=luck.choice((60, 10**6)),
    )  # fmt: skip
    alone, cache = Propagator(DIMENSIONS, bounds), StateCache()
    chain = list[bytes]()
    for a, b in pairwise(luck.cuts(len(log))):
        expected = run(alone, log, [a, b])
        held = cache if luck.maybe() else StateCache()
        with local_state(KEY, bounds, cache=held, root=root) as local:
            fold = fold_in(local, bounds)
            fold.validate()
            assert story(run(fold, log, [a, b])) == story(expected)
            chain.append(b"".join(dump(fold, increment=bool(chain))))
            fold.on_saved()
            local.settle(fold)
        assert digest(fold) == digest(alone)
        assert plain(fold.states()) == plain(alone.states())
    assert digest(restore(*chain, options=bounds)) == digest(alone)


def test_a_state_is_restored_into_files(tmp_path: Path) -> None:
    fold = Propagator(DIMENSIONS)
    run(fold, log_of(), [0, 120])
    with local_state(KEY, OPTIONS, cache={}, root=tmp_path) as local:
        local.settle(restore(b"".join(dump(fold)), space=local.fresh_space()))
    assert digest(step(tmp_path, 120, 240)) == straight(240)


@pytest.mark.parametrize("at_hand", [0, 10_000])
def test_columns_outgrow_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_hand: int
) -> None:
    monkeypatch.setattr(registers, "CODES_SMALL", 2)
    monkeypatch.setattr(registers, "PACK_MIN", 64)
    monkeypatch.setattr(merge, "AT_HAND_MAX", at_hand)
    monkeypatch.setattr("penstock.propagation.fold.table.ROWS_MIN", 1)
    monkeypatch.setattr("penstock.propagation.fold.table.BITS_MIN", 1)
    monkeypatch.setattr("penstock.propagation.fold.table.BYTES_MIN", 8)
    monkeypatch.setattr(module, "ROOM_BYTES", 8)
    for a, b in pairwise(history()):
        fold = step(tmp_path, a, b)
        fold.validate()
    assert fold.merge.registers.table["writer"].dtype == np.uint32
    assert digest(fold) == straight(240)


def test_processes_take_turns(tmp_path: Path) -> None:
    for a, b in pairwise(history()):
        subprocess.run([*CHILD, str(tmp_path), str(a), str(b)], check=True, timeout=60)
    found = found_in(tmp_path)
    assert found is not None and digest(found) == straight(240)


@pytest.mark.parametrize("at_hand", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_a_note_is_found_with_its_state(tmp_path: Path, at_hand: bool, shared: bool) -> None:
    cache, root = StateCache(), tmp_path if shared else None
    with local_state(KEY, OPTIONS, cache=cache, root=root) as local:
        local.settle(fold_in(local), note={"chain": 1 << 63, "saved": [7]})
    held = cache if at_hand or not shared else StateCache()
    with local_state(KEY, OPTIONS, cache=held, root=root) as local:
        assert local.found() is not None and local.note == {"chain": 1 << 63, "saved": [7]}


@pytest.mark.parametrize("shared", [True, False])
def test_a_state_that_was_folded_in_another_way_is_not_taken(tmp_path: Path, shared: bool) -> None:
    cache, root, other = StateCache(), tmp_path if shared else None, options(pending_ms=17)
    for bounds in (OPTIONS, other):
        with local_state(KEY, bounds, cache=cache, root=root) as local:
            assert local.found() is None and local.note is None
            local.settle(fold_in(local, bounds), note="mine")


def test_the_least_recently_used_state_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CACHED_MAX", 2)
    cache = StateCache()
    for partition in (0, 1, 2):
        with local_state(("p", "t", partition), OPTIONS, cache=cache, root=tmp_path) as local:
            local.settle(fold_in(local))
    assert list(cache) == [("p", "t", 1), ("p", "t", 2)]


# --- what nobody goes on with ---


def test_a_state_that_a_killed_worker_left_is_made_anew(tmp_path: Path) -> None:
    step(tmp_path, 0, 40)
    child = subprocess.Popen(
        [*CHILD, str(tmp_path), "40", "80", "hang"], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "changed\n"  # and not settled
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert not facts(tmp_path).exists() and found_in(tmp_path) is None
    assert digest(step(tmp_path, 0, 240)) == straight(240)


def test_a_worker_killed_between_its_steps_leaves_a_whole_state(tmp_path: Path) -> None:
    command = [*CHILD, str(tmp_path), "0", "40", "die"]
    assert subprocess.run(command, check=False, timeout=60).returncode == -signal.SIGKILL
    assert digest(step(tmp_path, 40, 240)) == straight(240)


def test_an_error_leaves_no_state(tmp_path: Path) -> None:
    step(tmp_path, 0, 40)
    with pytest.raises(AssertionError, match="nobody settles"):
        step_that_fails(tmp_path)
    assert found_in(tmp_path) is None


def test_a_state_from_before_the_machine_started_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step(tmp_path, 0, 40)
    monkeypatch.setattr(module, "_boot", lambda: "another")
    assert found_in(tmp_path) is None


@pytest.mark.parametrize("damage", ["facts", "facts cut", "column", "column cut"])
def test_damaged_files_are_not_taken(tmp_path: Path, damage: str) -> None:
    step(tmp_path, 0, 40)
    path = facts(tmp_path)
    if damage.startswith("column"):
        path = next(path.parent.glob("registers.values.*"))
    if damage.endswith("cut"):
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.unlink()
    assert found_in(tmp_path) is None
    assert digest(step(tmp_path, 0, 240)) == straight(240)


def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(b"in the way")
    with pytest.raises(LocalStateLost, match="t-0"):
        step(tmp_path, 0, 40)


def test_what_is_made_anew_leaves_nothing_of_the_old(tmp_path: Path) -> None:
    step(tmp_path, 0, 40)
    with local_state(KEY, OPTIONS, cache={}, root=tmp_path) as local:
        local.found()
        fold = Propagator(DIMENSIONS, space=local.fresh_space())
        run(fold, log_of(), [0, 240])
        local.settle(fold)
    fresh = tmp_path / "other"
    fresh.mkdir()
    step(fresh, 0, 240)
    names = [[path.name for path in facts(root).parent.iterdir()] for root in (tmp_path, fresh)]
    assert len(names[0]) == len(names[1]) and not {*names[0]} & {*names[1]} - {"facts", "lock"}


# --- two at once ---


def test_two_tasks_of_a_partition_do_not_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BUSY_S", 0.1)
    step(tmp_path, 0, 40)
    with local_state(KEY, OPTIONS, cache={}, root=tmp_path) as first:
        mine = fold_in(first)
        cache = StateCache()
        with local_state(KEY, OPTIONS, cache=cache, root=tmp_path) as second:
            assert second.found() is None
            other = Propagator(DIMENSIONS, space=second.fresh_space())
            run(other, log_of(), [0, 240])
            second.settle(other)
        run(mine, log_of(), [40, 240])
        first.settle(mine)
    assert digest(other) == digest(mine) == straight(240) and not cache
    assert found_in(tmp_path) is not None


def test_a_successor_waits_for_a_step_that_is_nearly_over(tmp_path: Path) -> None:
    holding, over = threading.Event(), threading.Event()

    def first() -> None:
        with local_state(KEY, OPTIONS, cache={}, root=tmp_path) as local:
            holding.set()
            over.wait(10)
            fold = fold_in(local)
            run(fold, log_of(), [0, 40])
            local.settle(fold)

    thread = threading.Thread(target=first)
    thread.start()
    holding.wait(10)
    threading.Timer(0.2, over.set).start()
    assert digest(step(tmp_path, 40, 240)) == straight(240)
    thread.join()


def test_a_file_that_is_replaced_stays_whole_for_who_has_it(tmp_path: Path) -> None:
    cache = StateCache()
    old = step(tmp_path, 0, 40, cache=cache)
    values = old.states().values.copy()
    with local_state(KEY, OPTIONS, cache={}, root=tmp_path) as local:
        fold = Propagator(DIMENSIONS, space=local.fresh_space())
        run(fold, log_of(), [0, 240])
        local.settle(fold)
    assert np.array_equal(old.states().values, values)
    with local_state(KEY, OPTIONS, cache=cache, root=tmp_path) as local:
        found = local.found()
        assert found is not None and digest(found) == straight(240)
        local.settle(found)


# --- where ---


def test_states_lie_in_the_folders_that_spark_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path}/a,{tmp_path}/b,{tmp_path}/gone")
    found = {executor_folder(("p", "t", partition)) for partition in range(20)}
    assert found == {tmp_path / "a" / "penstock", tmp_path / "b" / "penstock"}


def test_without_spark_they_lie_among_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPARK_LOCAL_DIRS", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert executor_folder(KEY) == tmp_path / f"penstock-{os.getuid()}"
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    assert executor_folder(KEY) is None


def test_a_folder_that_is_not_ones_own_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPARK_LOCAL_DIRS", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"penstock-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    assert executor_folder(KEY) is None


def test_what_found_no_room_leaves_none_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step(tmp_path, 0, 40)
    allocate, left = os.posix_fallocate, iter(range(9))

    def filling(*place: int) -> None:
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(*place)

    monkeypatch.setattr("os.posix_fallocate", filling)
    with (
        pytest.raises(LocalStateLost, match="No space left"),
        local_state(KEY, OPTIONS, cache={}, root=tmp_path) as local,
    ):
        Propagator(DIMENSIONS, space=local.fresh_space())
    assert [path.name for path in facts(tmp_path).parent.iterdir()] == ["lock"]
