"""The demo's claims, and what a person is shown of them."""

import pytest

from penstock.demo.archive.story import overtaken
from penstock.demo.chapters import Chapter, Screen, document_of
from penstock.demo.picture.samples import Sighting


def low(put_at: float, seen_at: float) -> Sighting:
    return Sighting(lane="LOW", put_at=put_at, seen_at=seen_at)


def edit(put_at: float, seen_at: float) -> Sighting:
    return Sighting(lane="CRITICAL", put_at=put_at, seen_at=seen_at)


def test_overtaken_is_put_before_and_seen_after() -> None:
    assert overtaken([low(1, 9), edit(2, 3)]) == 1
    assert overtaken([low(1, 2), edit(3, 4)]) == 0  # seen before the edit was put
    assert overtaken([low(5, 9), edit(2, 3)]) == 0  # put after it
    assert overtaken([low(1, 9), low(1, 8), edit(2, 3), edit(4, 5)]) == 2


def chapters(*, holds: bool) -> list[Chapter]:
    first, second = Chapter("One"), Chapter("Two")
    first.claim("water is wet", True, "felt it")
    first.headline["wetness"] = "100 %"
    second.note("  a remark")
    second.claim("fire is hot", holds, "felt it [too]")
    second.figures["degrees"] = 900
    return [first, second]


@pytest.mark.parametrize("holds", [True, False])
def test_one_claim_that_fails_fails_the_whole(holds: bool) -> None:
    document = document_of(chapters(holds=holds), seconds=1.234)
    assert document["ok"] is holds
    assert [claim["holds"] for claim in document["claims"]] == [True, holds]
    assert (document["figures"], document["headline"]) == ({"degrees": 900}, {"wetness": "100 %"})
    assert document["seconds"] == 1.23


def test_a_story_without_claims_proves_nothing() -> None:
    assert document_of([Chapter("Empty")], seconds=0)["ok"] is False


def test_a_person_sees_chapters_and_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(quiet=False)
    told = chapters(holds=False)
    for chapter in told:
        screen.chapter(chapter)
    screen.summary({**document_of(told, seconds=2.0), "picture": "here.html"})
    shown = capsys.readouterr().out
    assert "1 · One" in shown and "2 · Two" in shown and "a remark" in shown
    assert "felt it [too]" in shown  # not taken for markup
    assert "What did not hold" in shown and "A claim failed: 1 of 2 in 2 s." in shown
    assert "wetness" in shown and "here.html" in shown


def test_progress_without_a_terminal_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str],
) -> None:
    screen = Screen(quiet=False)
    for number in range(50):
        screen.progress(f"step {number}")
    assert capsys.readouterr().out.count("step") == 1


def test_quiet_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(quiet=True)
    told = chapters(holds=True)
    screen.act("Act", "text")
    screen.say("something")
    screen.progress("something")
    screen.chapter(told[0])
    screen.summary(document_of(told, seconds=1.0))
    assert capsys.readouterr().out == ""
