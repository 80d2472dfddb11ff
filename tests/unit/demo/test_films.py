"""The demo's world: the misfiled film is far from the question, and near once it is corrected."""

import numpy as np
from numpy.typing import NDArray

from penstock.demo.archive import films


def nearest(vectors: dict[str, NDArray[np.float32]]) -> list[str]:
    question = films.question()
    return sorted(
        vectors,
        key=lambda name: -float(question @ vectors[name] / np.linalg.norm(vectors[name])),
    )


def test_the_correction_moves_the_film_to_the_top() -> None:
    vectors = {name: films.film_vector(name) for name in films.CATALOGUE}
    assert films.MISFILED not in nearest(vectors)[:5]
    for index, value in films.components(films.TRUTH).items():
        vectors[films.MISFILED][index] = value
    assert nearest(vectors)[0] == films.MISFILED


def test_a_film_has_the_same_vector_every_time() -> None:
    one, again = (films.film_vector(films.MISFILED) for _ in range(2))
    assert one.shape == (films.DIMENSIONS,)
    assert one.tobytes() == again.tobytes()
