"""The simulator finds seeded mistakes: a checker that never complains would prove nothing."""

import pytest
from tests.simulation.mutants import MUTANTS

from verification.simulation.simulation import run_seed

SEEDS_MAX = 120


@pytest.mark.parametrize("name", MUTANTS)
def test_mistake_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant, profile = MUTANTS[name]
    mutant(monkeypatch)
    assert any(not run_seed(seed, profile).ok for seed in range(SEEDS_MAX)), name
