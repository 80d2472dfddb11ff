from penstock.cli.topic import rates_of, stats_view
from penstock.console import console


def topic(**values: object) -> dict[str, object]:
    empty = dict.fromkeys(
        ("ready", "delayed", "leased", "dead", "oldest_age_ms", "enqueued_total", "acked_total",
         "retried_total"), 0,
    )  # fmt: skip
    return {"name": "jobs", "partitions": [], **empty, **values}


def test_rates_are_differences_over_time() -> None:
    before = {"topics": [topic(enqueued_total=100, acked_total=50)]}
    after = {"topics": [topic(enqueued_total=300, acked_total=50), topic(name="new")]}
    assert rates_of(before, after, 2.0) == {"jobs": {"enqueued": 100.0, "acked": 0.0}}
    assert rates_of(before, after, 0.0) == {}


def test_the_table_shows_each_topic(capsys) -> None:  # type: ignore[no-untyped-def]
    found = {"topics": [topic(ready=3, oldest_age_ms=2000)]}
    console().print(
        stats_view(found, partitions=True, rates={"jobs": {"enqueued": 12.4, "acked": 0.0}})
    )
    printed = capsys.readouterr().out
    assert "jobs" in printed
    assert "2.0 s" in printed
    assert " 12 " in printed
