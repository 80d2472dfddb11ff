import pytest

from penstock.errors import InvalidArgument
from penstock.model.batch import SCHEMAS, Kind
from penstock.model.delta import vector_hash
from penstock.model.entries import EntryRun
from penstock.model.partitioning import partition_of, partitions_of_deltas
from penstock.model.topic import TopicConfig, TopicKind
from penstock.server.entries import GatewayEntries, packed_headers, producer_run

CONFIG = TopicConfig(name="jobs", payload_bytes_max=10)


def test_a_body_holds_every_column() -> None:
    entries = GatewayEntries(
        [b"a", b"bc"], [-1, 2], [b"k", b""], [packed_headers({"x": "y"}), b""], [0, 5], [-1, 3],
        [EntryRun(2, 4, 100, b"p1")],
    )  # fmt: skip
    columns = SCHEMAS[Kind.ENQ].decode(entries.body(), 2)
    assert columns.fixed("priority").tolist() == [-1, 2]
    assert columns.fixed("max_retries").tolist() == [-1, 3]
    assert list(columns.binary("payload")) == [b"a", b"bc"]
    assert columns.fixed("run_sequence").tolist() == [100]
    assert list(columns.binary("run_producer")) == [b"p1"]


def test_columns_of_defaults_are_absent() -> None:
    columns = SCHEMAS[Kind.ENQ].decode(GatewayEntries([b"a"], [0]).body(), 1)
    assert not {"key", "delay_ms"} & columns.views.keys() and columns.runs == 0


@pytest.mark.parametrize(
    ("entries", "field", "limit"),
    [
        (GatewayEntries([b"a", b"x" * 11], [0, 0]), "messages[1].payload", 10),
        (GatewayEntries([b"a"], [0], keys=[b"k" * 1025]), "messages[0].key", 1024),
        (GatewayEntries([b"a"], [0], headers=[b"h" * 16385]), "messages[0].headers", 16384),
        (
            GatewayEntries([b"a", b"b"], [0, 0], delays_ms=[0, -1]),
            "messages[1].delay_ms",
            31622400000,
        ),
        (GatewayEntries([b"a"], [0], max_retries=[1001]), "messages[0].max_retries", 1000),
        (GatewayEntries([b"a"] * 10_001, [0] * 10_001), "messages", 10_000),
    ],
)
def test_the_first_value_over_its_limit_is_named(
    entries: GatewayEntries, field: str, limit: int
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        entries.check(CONFIG)
    assert (refused.value.field, refused.value.limit) == (field, limit)


def test_expected_sequence_needs_keys_of_one_partition() -> None:
    eight = TopicConfig(name="jobs", partitions=8)
    one = GatewayEntries([b"a", b"b"], [0, 0], keys=[b"k", b"k"])
    assert one.partition(eight) == partition_of(b"k", 8)
    assert GatewayEntries([b"a"], [0]).partition(CONFIG) == 0
    for keys in (None, [b"k", b""], [b"k", b"other-2"]):
        with pytest.raises(InvalidArgument, match="expected_sequence"):
            GatewayEntries([b"a", b"b"], [0, 0], keys=keys).partition(eight)


def test_expected_sequence_of_deltas_needs_vectors_of_one_partition() -> None:
    config = TopicConfig(name="vectors", kind=TopicKind.DELTA, dimensions=2, partitions=8)
    one, other = (bytes(64) + vector_hash("n", name) for name in ("a", "b"))
    [home] = partitions_of_deltas([one], 8).tolist()
    assert GatewayEntries([one, one], [0, 0]).partition(config) == home
    with pytest.raises(InvalidArgument, match="expected_sequence"):
        GatewayEntries([one, other], [0, 0]).partition(config)


@pytest.mark.parametrize(
    ("producer", "epoch", "seq", "field"),
    [
        ("", 0, 1, "producer_id"),
        ("é" * 65, 0, 1, "producer_id"),
        ("p", 0, None, "seq"),
        ("p", 0, 1 << 63, "seq"),
        ("p", 1 << 63, 1, "epoch"),
    ],
)
def test_half_a_producer_key_is_refused(
    producer: str, epoch: int, seq: int | None, field: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        producer_run(producer, epoch=epoch, seq=seq, count=1)
    assert refused.value.field == field
