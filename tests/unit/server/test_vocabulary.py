"""The proto file, the request types and the model must not drift apart."""

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.model.topic import TopicConfig
from penstock.server import vocabulary as say
from penstock.server._generated import penstock_pb2 as pb
from penstock.server.grpc.listener import SERVICE
from penstock.server.http.routes import ENQUEUES, routes
from penstock.server.operations import OPERATIONS

ROOT = Path(__file__).parents[3]
HTTP_ONLY = {"payload_base64"}
METHODS = {m.name: m for m in SERVICE.methods}


def fields(message: str) -> set[str]:
    return set(pb.DESCRIPTOR.message_types_by_name[message].fields_by_name)


@pytest.mark.parametrize("name", sorted((OPERATIONS | ENQUEUES).keys()))
def test_a_call_has_the_same_arguments_on_both_sides(name: str) -> None:
    request = (OPERATIONS | ENQUEUES)[name].request
    declared = set(request.__struct_fields__) - HTTP_ONLY
    assert {f.name for f in METHODS[name].input_type.fields} == declared


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_a_call_has_the_same_result_on_both_sides(name: str) -> None:
    declared = set(OPERATIONS[name].response.__struct_fields__)
    assert {f.name for f in METHODS[name].output_type.fields} == declared


def test_both_listeners_offer_every_call() -> None:
    assert set(METHODS) == set(OPERATIONS | ENQUEUES) | {"PopStream", "Subscribe"}
    assert {r.name for r in routes().all} == set(OPERATIONS | ENQUEUES)


def test_a_heap_has_every_attribute_of_a_topic() -> None:
    attributes = set(TopicConfig.__struct_fields__) - {"name"} | {"topic"}
    assert fields("Heap") == set(say.HeapAnswer.__struct_fields__) == attributes
    assert fields("NewMessage") == set(say.NewMessage.__struct_fields__) - HTTP_ONLY
    assert fields("PopOpen") == set(say.PopOpen.__struct_fields__)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("Message", say.MessageAnswer),
        ("PopItem", say.LeasedMessageAnswer),
        ("DeadMessage", say.DeadMessageAnswer),
        ("HeapStats", say.HeapStats),
        ("PartitionStats", say.PartitionStatsAnswer),
        ("Key", say.KeyInfo),
    ],
)
def test_results_within_results_agree(message: str, shown: type) -> None:
    in_json = set(shown.__struct_fields__) - {"payload_base64", "key_base64"}  # type: ignore[attr-defined]
    assert fields(message) == in_json


def test_the_generated_code_is_current() -> None:
    script = ROOT / "scripts" / "generate_proto.py"
    subprocess.run([sys.executable, script, "--check"], check=True, timeout=200)
