"""Sinks from settings: built without connecting, refused by name."""

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import InvalidArgument
from penstock.sinks.protocol import Feed
from penstock.spark.delivery.attachment import RoutedSink, attach, feed_of, transforms_of
from penstock.spark.settings import PipelineSettings
from penstock.spark.source.options import Connecting

NOWHERE = Connecting(url="penstock://127.0.0.1:1")  # a connection to it would fail


def attached(folder: Path, *tables: dict[str, Any]) -> list[RoutedSink]:
    tree = {"name": "p", "topics": ["t"], "state": str(folder), "sink": list(tables)}
    return attach(PipelineSettings.of(tree), pipeline="p-1", node=NOWHERE)


def test_nothing_is_connected_to_before_it_is_opened(tmp_path: Path) -> None:
    remote = {"kind": "remote", "topic": "copy", "url": "penstock://127.0.0.1:2"}
    found = attached(
        tmp_path, {"kind": "lake", "path": str(tmp_path / "lake")}, remote,
        {"kind": "notify", "topic": "news"}, {"kind": "cache", "url": "redis://127.0.0.1:1"},
    )  # fmt: skip
    assert [one.sink.name for one in found] == ["lake", "remote", "notify", "cache"]
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_is_what_the_sinks_take(tmp_path: Path) -> None:
    lake = attached(tmp_path, {"kind": "lake", "path": str(tmp_path / "lake")})
    remote = attached(tmp_path, {"kind": "remote", "topic": "copy", "url": "penstock://h:2"})
    cache = attached(tmp_path, {"kind": "cache", "url": "redis://127.0.0.1:1"})
    assert feed_of([]) == Feed(0)
    assert feed_of(remote) == Feed.DELTAS | Feed.PAYLOADS
    assert feed_of(cache) == feed_of(lake) == Feed.STATES | Feed.DELTAS
    assert Feed.PAYLOADS in feed_of([*lake, *remote])


@pytest.mark.parametrize(
    ("table", "field"),
    [
        ({"kind": "lake"}, "sink[0].path"),
        ({"kind": "lake", "path": "x", "color": 1}, "sink[0].color"),
        ({"kind": "lake", "path": "x", "route": "color=red"}, "sink[0].route"),
        ({"kind": "lakes"}, "sink[0].kind"),
    ],
)
def test_a_table_that_will_not_do_is_named(
    tmp_path: Path, table: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        attached(tmp_path, table)
    assert caught.value.field == field
    assert "sink " in caught.value.message


def halved(states: object) -> object:
    return states


def tripled(states: object) -> object:
    return states


def test_a_transform_of_a_file_is_for_all_sinks_of_vectors(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.toml"
    file.write_text(
        'name = "p"\ntopics = ["t"]\nstate = "state"\n'
        f'[transform]\nfunction = "{__name__}:tripled"\n'
        '[[sink]]\nkind = "lake"\npath = "lake"\n'
        f'[[sink]]\nkind = "index"\npath = "index"\ntransform = "{__name__}:halved"\n'
        '[[sink]]\nkind = "cache"\nurl = "redis://127.0.0.1:1"\ntransform = "none"\n'
        '[[sink]]\nkind = "remote"\nurl = "penstock://127.0.0.1:2"\n'
    )
    settings = PipelineSettings.load(file)
    sinks = attach(settings, pipeline="p-1", node=NOWHERE)

    assert transforms_of(settings, sinks) == {"lake": tripled, "index": halved}
    assert transforms_of(settings, sinks, halved) == {"lake": halved, "index": halved}


def test_a_sink_without_tasks_opts_out_of_the_transform_for_all(tmp_path: Path) -> None:
    plain: dict[str, Any] = {"kind": "tests.spark.jobs.plain_sink:PlainSink", "name": "plain"}
    plain |= {"path": str(tmp_path / "plain")}
    tree = {"name": "p", "topics": ["t"], "state": str(tmp_path)}
    tree["transform"] = {"function": f"{__name__}:halved"}  # type: ignore[assignment]

    def found(**more: str) -> dict[str, Any]:
        settings = PipelineSettings.of(tree | {"sink": [plain | more]})
        return transforms_of(settings, attach(settings, pipeline="p-1", node=NOWHERE))

    with pytest.raises(InvalidArgument, match=r'plain takes no transform.*transform = "none"'):
        found()
    assert found(transform="none") == {}


def test_routes_are_read(tmp_path: Path) -> None:
    table = {"kind": "lake", "path": "x", "route": ["namespace=a", "op=delete"]}
    (one,) = attached(tmp_path, table)
    assert [str(route) for route in one.routes.routes] == ["namespace=a", "op=DELETE"]
