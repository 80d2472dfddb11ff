"""Hundreds of small clusters, each with its own misfortunes; every history is checked."""

import os

import pytest

from verification.simulation.campaign import RUN_SECONDS_MAX, results, runs_of
from verification.simulation.command import describe
from verification.simulation.profiles import PROFILES
from verification.simulation.simulation import run_seed

SEEDS = 504
CPU_SECONDS_MAX = 240  # two minutes on two cores; what else the machine does is not counted


@pytest.mark.timeout(RUN_SECONDS_MAX + 300)  # a run that hangs is given up before, and named
def test_every_seed_keeps_every_promise() -> None:
    jobs = max(1, min(2, os.cpu_count() or 1))
    before = _cpu_seconds()
    failures = [describe(r) for r in results(runs_of(0, SEEDS, None), jobs) if not r.ok]
    assert not failures, "\n\n".join(failures[:3])
    assert _cpu_seconds() - before < CPU_SECONDS_MAX


def _cpu_seconds() -> float:
    """Of this process and of those it has started that have ended."""
    return sum(os.times()[:4])


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_does_what_it_is_for(profile: str) -> None:
    """A run without messages, epochs or faults would prove nothing."""
    found = [run_seed(seed, profile) for seed in (1, 2)]
    assert sum(r.verdict.acknowledged for r in found) > 50
    assert sum(r.verdict.leases for r in found) > 5
    assert all(r.verdict.epochs >= PROFILES[profile].partitions for r in found)
    assert {fault for r in found for fault in r.faults} <= set(PROFILES[profile].faults)


def test_same_seed_same_trace() -> None:
    """In another process too, whose sets are in another order."""
    runs = runs_of(0, 12, None)
    here = {seed: run_seed(seed, profile).trace for seed, profile in runs}
    elsewhere = {r.seed: r.trace for r in results(runs, 2)}
    assert here == elsewhere
    assert len(set(here.values())) == len(runs)
