"""A few seconds of hostile bytes against a real node; `make fuzz` has more time."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from penstock.client.network.endpoints import open_connection
from penstock.errors import NotFound
from penstock.replication.assignment import PartitionRecord
from penstock.testing.process import server_process
from penstock.wire.frame import FrameDecoder
from verification.fuzz import corpus
from verification.fuzz.command import fuzz, fuzz_cluster, fuzz_gateway
from verification.fuzz.driving import Case
from verification.fuzz.mutation import MUTATIONS, frame_bytes
from verification.fuzz.peer_corpus import PeerCorpus
from verification.fuzz.targets import NodeTarget

CASES = range(600)
RECORD = PartitionRecord(voters=("n1", "n2", "n3"), uuids={"n1": "u1", "n2": "u2"})
PEERS = PeerCorpus({(1, 0): RECORD, (2, 0): RECORD})


async def test_hostile_bytes_cost_nobody_but_their_sender(tmp_path: Path) -> None:
    findings = await fuzz(tmp_path, seed=20, cases=CASES, seconds=None)
    assert findings.problems == []
    assert findings.cases == len(CASES) and findings.frames > 2 * len(CASES)


async def test_what_no_node_would_say_ends_no_node(tmp_path: Path) -> None:
    findings = await fuzz_cluster(tmp_path, seed=4, cases=CASES[:400], seconds=None)
    assert findings.problems == []
    assert findings.cases == 400


async def test_hostile_requests_are_never_the_gateways_own_failure(tmp_path: Path) -> None:
    """Before, the third case found a request over gRPC that was answered with UNKNOWN, as the
    node's own failure."""
    findings = await fuzz_gateway(tmp_path, seed=5, cases=CASES[:400], seconds=None)
    assert findings.problems == []
    assert findings.cases == 400 and findings.answers > 20_000


@pytest.mark.parametrize("topic", [corpus.QUEUE, corpus.DELTAS])
async def test_a_node_that_serves_only_a_part_is_found_out(tmp_path: Path, topic: str) -> None:
    async with server_process(tmp_path / "data") as server:
        target = NodeTarget(server)
        await target.prepare()
        for _ in range(3):
            await target.use()
        connection = await open_connection(server.url)
        given = await connection.call("confirm", method="topic_delete", subject=topic)
        await connection.call("topic_delete", topic=topic, force=True, confirm=given["confirm"])
        with pytest.raises(NotFound):
            await target.use()
        await connection.close()
        await target.close()


def test_a_case_follows_from_its_seed_and_number() -> None:
    assert Case(1, 7).pieces == Case(1, 7).pieces
    assert Case(1, 7).pieces != Case(2, 7).pieces


@pytest.mark.parametrize(
    "kind", corpus.KINDS + PEERS.kinds, ids=lambda kind: kind.__qualname__.strip("_")
)
def test_what_mutations_start_from_is_a_frame(kind: corpus.Make) -> None:
    dice = random.Random(1)
    for number in range(1, 20):
        sent = kind(dice, number)
        (found,) = FrameDecoder().feed(frame_bytes(sent))
        assert found.type == sent.type and found.sequence == sent.number
        for mutation in MUTATIONS:
            assert isinstance(mutation(dice, sent), bytes)
