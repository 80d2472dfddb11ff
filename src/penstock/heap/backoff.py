"""When a returned message may be tried again: exponential backoff with full jitter, without dice.

The delay before try *n + 1* is drawn evenly from 0 to `base * 2^(n - 1)`, at most `cap`. The draw
is a hash of (partition, message, attempt): spread over messages as a random number would be, and
the same for whoever computes it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.model.topic import TopicConfig

DOUBLINGS_MAX: Final = 40  # beyond every cap; keeps the shift within 64 bits
_STEP: Final = 0x9E3779B97F4A7C15
_WORD: Final = (1 << 64) - 1
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)


def backoff_ms(
    config: TopicConfig,
    *,
    partition: int,
    messages: NDArray[np.uint64],
    attempts: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Delays after the failed tries numbered `attempts` (1 is the first)."""
    doublings = np.minimum(attempts - 1, DOUBLINGS_MAX)
    # In floats: exact far beyond the cap, and nothing can overflow.
    ceiling = np.minimum(config.backoff_ms_base * np.exp2(doublings), config.backoff_ms_cap)
    draw = _hash(
        messages * np.uint64(_STEP) + (attempts.view(np.uint64) << np.uint64(32)), partition
    )
    delays: NDArray[np.int64] = (draw * (ceiling + 1)).astype(np.int64)
    return delays


def _hash(values: NDArray[np.uint64], seed: int) -> NDArray[np.float64]:
    """Numbers spread evenly over [0, 1): the finaliser of splitmix64."""
    mixed = values + np.uint64((seed + 1) * _STEP & _WORD)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
