import msgspec
import pytest

from penstock.errors import InvalidArgument
from penstock.model.topic import HOUR_MS, RETENTION_MS_MAX, TopicConfig, TopicKind, topic_config


def test_a_delta_topic_keeps_its_log_unless_told_otherwise() -> None:
    kept = topic_config({"name": "d", "kind": "delta", "dimensions": 8})
    assert (kept.kind, kept.retention_ms) == (TopicKind.DELTA, RETENTION_MS_MAX)
    told = topic_config({"name": "d", "kind": "delta", "dimensions": 8, "retention_ms": 5})
    assert told.retention_ms == 5
    assert topic_config({"name": "q"}).retention_ms < RETENTION_MS_MAX


def test_a_configuration_of_before_dead_letters_had_a_retention_still_loads() -> None:
    old = msgspec.json.decode(b'{"name": "q", "id": 7, "retention_ms": 1000}', type=TopicConfig)
    assert (old.retention_ms, old.dlq_retention_ms) == (1000, 14 * 24 * HOUR_MS)


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"kind": "delta"}, 4096),
        ({"kind": "delta", "dimensions": 4097}, 4096),
        ({"kind": "delta", "dimensions": -1}, 4096),
        ({"dimensions": 1}, 0),
    ],
)
def test_dimensions_fit_the_kind(fields: dict[str, object], limit: int) -> None:
    with pytest.raises(InvalidArgument) as refused:
        topic_config({"name": "t", **fields})
    assert (refused.value.field, refused.value.limit) == ("dimensions", limit)


@pytest.mark.parametrize("change", [{"kind": "queue"}, {"dimensions": 9}])
def test_the_kind_is_fixed(change: dict[str, object]) -> None:
    config = topic_config({"name": "d", "kind": "delta", "dimensions": 8})
    with pytest.raises(InvalidArgument, match="fixed at creation"):
        config.updated(change)
    assert config.updated({"dedup_ms": 7}).kind is TopicKind.DELTA
