"""What the data source may be told."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import InvalidArgument
from penstock.spark.source.options import SPLIT_ROWS, ReadOptions, WriteOptions
from penstock.spark.store import StoreAddress

LEAST = {"url": "penstock://h:1", "topic": "jobs"}


def test_the_least_that_must_be_said() -> None:
    found = ReadOptions.of(LEAST)
    assert (found.node.url, found.topics, found.mode) == ("penstock://h:1", ("jobs",), "messages")
    assert (found.starting, found.ending, found.rows_max) == ("earliest", "latest", None)
    assert (found.split_rows, found.fail_on_data_loss) == (SPLIT_ROWS, True)


def test_case_does_not_count_and_topics_keep_their_order() -> None:
    found = ReadOptions.of(
        {
            "URL": "penstock://h",
            "Topics": "b, a",
            "MAXROWSPERTRIGGER": "7",
            "failondataloss": "False",
        }
    )
    assert (found.topics, found.rows_max, found.fail_on_data_loss) == (("b", "a"), 7, False)


def test_offsets_and_times() -> None:
    found = ReadOptions.of(
        LEAST
        | {"startingOffsets": '{"jobs": {"0": 17}}', "endingTime": "2026-01-02T03:04:05.5+01:00"}
    )
    assert found.starting == {"jobs": {0: 17}}
    assert found.ending_ms == 1767319445500


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"url": ""}, "url"),
        ({"url": "http://h"}, "url"),
        ({"topic": ""}, "topic"),
        ({"topics": "a"}, "topic"),
        ({"topic": "", "topics": "a,a"}, "topics"),
        ({"subscribePattern": "j.*"}, "topic"),
        ({"topic": "", "subscribePattern": "("}, "subscribePattern"),
        ({"topic": "", "assign": '{"jobs": []}'}, "assign"),
        ({"startingOffsetsByTimestamp": '{"jobs": 3}'}, "startingOffsetsByTimestamp"),
        ({"maxTriggerDelay": "soon"}, "maxTriggerDelay"),
        ({"includeHeaders": "maybe"}, "includeHeaders"),
        ({"apiKey": "k", "apiKeyFile": "f"}, "apiKey"),
        ({"mode": "x"}, "mode"),
        ({"splitRows": "0"}, "splitRows"),
        ({"maxBytesPerTrigger": "1.5"}, "maxBytesPerTrigger"),
        ({"startingOffsets": '{"jobs": 3}'}, "startingOffsets"),
        ({"startingTime": "soon"}, "startingTime"),
        ({"failOnDataLoss": "maybe"}, "failOnDataLoss"),
        ({"colour": "red"}, "colour"),
        ({"state": "/s"}, "state"),
        ({"mode": "deltas", "propagation.dedup_ms": "1"}, "propagation.dedup_ms"),
        ({"mode": "released", "splitRows": "7"}, "splitrows"),
        ({"mode": "vectors", "minPartitions": "2"}, "minpartitions"),
        ({"mode": "released", "storage.aws_region": "x"}, "state"),
        ({"mode": "released", "snapshotDeltas": "0"}, "snapshotDeltas"),
        ({"mode": "released", "propagation.colour": "1"}, "propagation.colour"),
        ({"mode": "released", "propagation.pending_ms": "soon"}, "propagation.pending_ms"),
        ({"mode": "released", "propagation.pending_ms": "0"}, "pending_ms"),
    ],
)
def test_a_bad_option_is_named(
    changes: dict[str, str], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PENSTOCK_URL", raising=False)
    with pytest.raises(InvalidArgument) as refused:
        ReadOptions.of(LEAST | changes)
    assert refused.value.field == field


def test_topics_by_a_pattern_or_by_partitions() -> None:
    url = {"url": LEAST["url"]}
    assert ReadOptions.of(url | {"subscribePattern": "j.*"}).pattern == "j.*"
    found = ReadOptions.of(url | {"assign": '{"jobs": [0, 2]}', "maxTriggerDelay": "500ms"})
    assert (found.topics, found.assigned, found.delay_s) == (("jobs",), {"jobs": (0, 2)}, 0.5)


def test_how_to_fold_and_where_the_state_is() -> None:
    found = ReadOptions.of(
        LEAST
        | {"mode": "vectors", "state": "s3://bucket/folds/", "Storage.AWS_Region": "x"}
        | {"propagation.pending_ms": "17", "snapshotDeltas": "9"}
    )
    assert found.state == StoreAddress(url="s3://bucket/folds", options={"aws_region": "x"})
    assert (found.propagation.pending_ms, found.snapshot_deltas) == (17, 9)
    folder = ReadOptions.of(LEAST | {"mode": "released", "state": "folds"}).state
    assert folder is not None and folder.folder == Path.cwd() / "folds"


def test_a_key_file_must_be_there(tmp_path: Path) -> None:
    missing = ReadOptions.of(LEAST | {"apiKeyFile": str(tmp_path / "none")})
    with pytest.raises(InvalidArgument, match="apiKeyFile cannot be read"):
        missing.node.access()


def test_a_writer_takes_its_own_options_only() -> None:
    assert WriteOptions.of(LEAST | {"producer": "p", "checkpointLocation": "/c"}).producer == "p"
    with pytest.raises(InvalidArgument, match="no such option: mode"):
        WriteOptions.of(LEAST | {"mode": "deltas"})
