"""The demo's little world: films that people edit, beside thousands of stills that a model embeds.

A film's first components stand for what it is about, so that a search can be read; the others are
noise, as in any embedding. The same seed gives the same world.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

DIMENSIONS: Final = 64
FILMS: Final = "films"  # namespaces
STILLS: Final = "stills"
TRAITS: Final = ("space", "sea", "comedy", "crime", "romance", "music", "winter", "robots")
NOISE: Final = 0.04

# What each is about, and how much. The wedding was filed by a model that read its title only.
CATALOGUE: Final[dict[str, dict[str, float]]] = {
    "Wedding in Zero Gravity": {"romance": 1.0, "music": 0.4},
    "The Laughing Cosmonaut": {"space": 0.9, "comedy": 0.7},
    "Orbit of Fools": {"space": 0.8, "comedy": 0.8, "crime": 0.3},
    "Salt and Static": {"sea": 0.9, "music": 0.5},
    "The Lighthouse Orchestra": {"sea": 0.7, "music": 0.9},
    "Nine Quiet Burglars": {"crime": 0.9, "comedy": 0.5},
    "A Tin Heart": {"robots": 0.9, "romance": 0.6},
    "Snow on the Antenna": {"winter": 0.9, "space": 0.4},
    "The Ferry Leaves at Noon": {"sea": 0.8, "romance": 0.7},
    "Murder on Platform Nine": {"crime": 1.0, "winter": 0.4},
    "The Accordion Heist": {"crime": 0.7, "music": 0.7, "comedy": 0.4},
    "Europa Below": {"space": 0.9, "sea": 0.6, "winter": 0.3},
    "Two Snowploughs": {"winter": 0.8, "comedy": 0.6},
    "The Robot Who Hummed": {"robots": 0.8, "music": 0.7},
    "Harbour Lights, Harbour Lies": {"sea": 0.6, "crime": 0.8},
    "Letters from the Airlock": {"space": 0.8, "romance": 0.7},
    "The Understudy's Machine": {"robots": 0.7, "comedy": 0.6, "music": 0.3},
    "Frostbite Serenade": {"winter": 0.7, "music": 0.6, "romance": 0.4},
    "Gravity Is a Rumour": {"space": 1.0, "crime": 0.4},
    "The Captain's Third Tango": {"sea": 0.5, "music": 0.6, "romance": 0.6},
    "Assembly Line Blues": {"robots": 0.9, "music": 0.5, "crime": 0.2},
    "The Polar Jury": {"winter": 0.6, "crime": 0.7},
    "Deckchairs and Daggers": {"sea": 0.6, "crime": 0.5, "comedy": 0.5},
    "The Clockmaker's Satellite": {"space": 0.7, "robots": 0.7},
}
MISFILED: Final = "Wedding in Zero Gravity"
TRUTH: Final[dict[str, float]] = {"space": 1.0, "comedy": 1.0, "romance": 0.3, "music": 0.0}
QUESTION: Final[dict[str, float]] = {"space": 1.0, "comedy": 1.0}


def components(traits: Mapping[str, float]) -> dict[int, float]:
    """Traits as the components that stand for them."""
    return {TRAITS.index(name): share for name, share in traits.items()}


def film_vector(name: str) -> NDArray[np.float32]:
    """What a model made of a film: its traits, and a little noise that belongs to its name."""
    noise = np.random.default_rng(zlib.crc32(name.encode()))
    vector = noise.normal(0.0, NOISE, DIMENSIONS).astype(np.float32)
    vector[: len(TRAITS)] = 0.0
    for index, share in components(CATALOGUE[name]).items():
        vector[index] = share
    return vector


def question() -> NDArray[np.float32]:
    """What a visitor asks for, as a vector."""
    vector = np.zeros(DIMENSIONS, np.float32)
    for index, share in components(QUESTION).items():
        vector[index] = share
    return vector
