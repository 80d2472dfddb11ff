"""How urgent a body of changes is."""

import random

from penstock.model.entries import CHANGES, most_urgent


def test_the_most_urgent_class_of_changes_is_found() -> None:
    dice = random.Random(1)
    assert most_urgent(b"", 0) is None
    for count in (1, 2, 32, 33, 200):
        classes = [dice.randrange(1, 4) for _ in range(count)]
        payloads = [bytes((1, 2, c)) + bytes(dice.randrange(9)) for c in classes]
        body = CHANGES.encode(count, {"payload": payloads})
        assert most_urgent(body, count) == min(classes)
