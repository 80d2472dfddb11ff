import secrets
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from penstock.config import (
    BOUNDS,
    GROUPS,
    OPTIONS,
    ClusterOptions,
    Config,
    HttpOptions,
    TlsOptions,
    env_name,
    host_port,
    is_loopback,
)
from penstock.errors import InvalidArgument
from penstock.log.flush import LogOptions

TLS = {"tls.cert": "cert.pem", "tls.key": "key.pem"}


def load(text: str = "", *, folder: Path | None = None, **sources: Any) -> Config:
    file = None
    if folder is not None:
        file = folder / "penstock.toml"
        file.write_text(text)
    return Config.load(file, **{"environ": {}, **sources})


def refused(**sources: Any) -> str:
    with pytest.raises(InvalidArgument) as refusal:
        load(**sources)
    return refusal.value.field


def test_the_defaults_are_valid_and_private() -> None:
    config = load()
    assert config == Config().validate()
    assert config.ports == {"native": 7440, "grpc": 7441, "http": 7442}
    assert not config.exposed and not config.keys_required and not config.tls_enabled


def test_a_later_source_wins(tmp_path: Path) -> None:
    text = "writer_threads = 1\ndrain_s = 1.0\nhost = '::1'\n[limits]\nidle_s = 1\n"
    environ = {"PENSTOCK_WRITER_THREADS": "2", "PENSTOCK_DRAIN_S": "2"}
    config = load(text, folder=tmp_path, environ=environ, overrides={"writer_threads": 3})
    assert (config.writer_threads, config.drain_s, config.limits.idle_s) == (3, 2.0, 1.0)
    assert config.host == "::1"


def test_an_override_of_none_was_not_given() -> None:
    environ = {"PENSTOCK_HOST": "127.0.0.2"}
    assert load(environ=environ, overrides={"host": None}).host == "127.0.0.2"


def test_the_file_can_be_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "other.toml"
    file.write_text("log_level = 'debug'")
    assert load(environ={"PENSTOCK_CONFIG": str(file)}).log_level == "debug"


def test_groups_are_reached_from_every_source(tmp_path: Path) -> None:
    text = "[log]\nsegment_bytes = 1048576\n[tls]\ncert = 'c.pem'\n"
    environ = {"PENSTOCK_TLS_KEY": "k.pem", "PENSTOCK_LIMITS_STREAMS_MAX": "7"}
    overrides = {"upkeep.snapshot_s": "5", "audit.files_max": 3}
    config = load(text, folder=tmp_path, environ=environ, overrides=overrides)
    assert config.log == LogOptions(segment_bytes=1 << 20)
    assert config.tls == TlsOptions(cert=Path("c.pem"), key=Path("k.pem"))
    assert (config.limits.streams_max, config.upkeep.snapshot_s) == (7, 5.0)
    assert config.audit.files_max == 3


def test_text_becomes_what_the_option_is() -> None:
    environ = {
        "PENSTOCK_DATA": "/tmp/x",
        "PENSTOCK_INSECURE": "true",
        "PENSTOCK_REQUIRE_KEY": "1",
        "PENSTOCK_NODE": "42",
        "PENSTOCK_HTTP_PORT": "-1",
    }
    config = load(environ=environ)
    assert config.data == Path("/tmp/x")
    assert config.insecure is True and config.require_key is True
    assert config.node == "42"
    assert "http" not in config.ports


@pytest.mark.parametrize("port", [-1, None])
def test_a_port_can_be_off(port: int | None) -> None:
    assert "grpc" not in Config(grpc_port=port).ports


def test_any_free_port_may_be_asked_for_thrice() -> None:
    assert set(Config(native_port=0, grpc_port=0, http_port=0).validate().ports.values()) == {0}


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("colour = 'red'", "colour"),
        ("[limits]\ncolour = 1", "limits.colour"),
        ("[log]\nsegment = 1", "log.segment"),
        ("limits = 3", "limits"),
        ("[host]\nname = 'x'", "host"),
        ("http_port = 'eighty'", "http_port"),
        ("http_port = 70000", "http_port"),
        ("[limits]\nidle_s = 0", "limits.idle_s"),
        ("[upkeep]\nsnapshot_s = nan", "upkeep.snapshot_s"),
        ("log_level = 'loud'", "log_level"),
        ("data = 3", "data"),
        ("native_port = 5\nhttp_port = 5", "http_port"),
        ("not toml", "config"),
    ],
)
def test_the_file_s_mistakes_are_named(tmp_path: Path, text: str, field: str) -> None:
    assert refused(text=text, folder=tmp_path) == field


@pytest.mark.parametrize(
    ("environ", "field"),
    [
        ({"PENSTOCK_HTPP_PORT": "1"}, "PENSTOCK_HTPP_PORT"),
        ({"PENSTOCK_HTTP_PORT": "x"}, "http_port"),
        ({"PENSTOCK_LIMITS_IDLE_S": "soon"}, "limits.idle_s"),
        ({"PENSTOCK_CONFIG": "/does/not/exist"}, "config"),
    ],
)
def test_the_environment_s_mistakes_are_named(environ: dict[str, str], field: str) -> None:
    assert refused(environ=environ) == field


def test_variables_of_others_are_left_alone() -> None:
    load(environ={"PENSTOCK_URL": "x", "PENSTOCK_API_KEY": "y", "PATH": "/", "PENSTOCK": "z"})


def test_an_unknown_override_is_named() -> None:
    assert refused(overrides={"colour": None}) == "colour"


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({}, "tls.cert"),
        ({"tls.cert": "c.pem"}, "tls.key"),
        ({"tls.key": "k.pem"}, "tls.cert"),
        ({"insecure": True, "require_key": False}, "require_key"),
        ({**TLS, "require_key": False}, "require_key"),
        ({**TLS, "tls.require_client": True}, "tls.ca"),
    ],
)
def test_an_exposed_node_is_guarded(overrides: dict[str, Any], field: str) -> None:
    assert refused(overrides={"host": "0.0.0.0", **overrides}) == field


@pytest.mark.parametrize("overrides", [{"insecure": True}, TLS])
def test_an_exposed_node_wants_keys(overrides: dict[str, Any]) -> None:
    config = load(overrides={"host": "0.0.0.0", **overrides})
    assert config.exposed and config.keys_required


def test_a_node_without_listeners_is_not_exposed() -> None:
    off = dict.fromkeys(("native_port", "grpc_port", "http_port"), -1)
    assert not load(overrides={"host": "0.0.0.0", **off}).exposed


def test_keys_can_be_required_on_loopback() -> None:
    assert load(overrides={"require_key": True}).keys_required


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost", "::ffff:127.0.0.1"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["", "0.0.0.0", "::", "10.0.0.1", "localhost.example", "::ffff:0:1"]
)
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)


def cluster(**overrides: Any) -> dict[str, Any]:
    return {"cluster.etcd": "10.0.0.1:2379", "node": "n1", **overrides}


def test_a_list_may_be_written_with_commas() -> None:
    environ = {"PENSTOCK_CLUSTER_ETCD": "a:1, https://[::1]:2", "PENSTOCK_NODE": "n1"}
    assert load(environ=environ).cluster.etcd == ("a:1", "https://[::1]:2")
    assert not load(environ={"PENSTOCK_CLUSTER_ETCD": ""}).cluster.enabled


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"node": ""}, "node"),
        ({"node": "a/b"}, "node"),
        ({"native_port": -1}, "native_port"),
        ({"cluster.etcd": "10.0.0.1"}, "cluster.etcd"),
        ({"cluster.etcd": "h:70000"}, "cluster.etcd"),
        ({"cluster.name": "a/b"}, "cluster.name"),
        ({"cluster.advertise": "a:b:c"}, "cluster.advertise"),
        ({"cluster.policy": "random"}, "cluster.policy"),
        ({"cluster.lease_s": 0}, "cluster.lease_s"),
        ({"replication.silence_ms": 1}, "replication.silence_ms"),
        ({"require_key": True}, "cluster.key"),
        (
            {"host": "0.0.0.0", "insecure": True, "cluster.key": "0123456789abcdef" * 2},
            "cluster.advertise",
        ),
    ],
)
def test_a_cluster_s_node_is_told_what_is_missing(overrides: dict[str, Any], field: str) -> None:
    load(overrides=cluster())
    assert refused(overrides=cluster(**overrides)) == field


@pytest.mark.parametrize(
    ("text", "parts"),
    [("h:1", ("h", 1)), ("h", ("h", 9)), ("[::1]:2", ("::1", 2)), ("[::1]", ("::1", 9))],
)
def test_host_and_port(text: str, parts: tuple[str, int]) -> None:
    assert host_port(text, field="x", port=9) == parts


def test_every_option_has_one_variable() -> None:
    assert len({env_name(path) for path in OPTIONS}) == len(OPTIONS)
    assert set(BOUNDS) <= set(OPTIONS)
    groups = {"http", "tls", "limits", "log", "upkeep", "audit", "cluster", "replication", "live"}
    assert groups == GROUPS
    for path, (low, high) in BOUNDS.items():
        default = attrgetter(path)(Config())
        assert default is None or low <= default <= high


def test_the_documentation_lists_every_option() -> None:
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text("utf-8")
    for path in OPTIONS:
        assert f"`{path}`" in text, path
        assert f"`{env_name(path)}`" in text, path


def test_sinks_of_the_node_are_json_in_the_environment() -> None:
    text = '[{"topic": "v", "kind": "memory", "batch_ms": 0}]'
    found = Config.load(environ={"PENSTOCK_LIVE_SINK": text}).live.sink
    assert found == ({"topic": "v", "kind": "memory", "batch_ms": 0},)
    with pytest.raises(InvalidArgument) as refused:
        Config.load(environ={"PENSTOCK_LIVE_SINK": "memory"})
    assert refused.value.field == "live.sink"


def test_sites_whose_pages_are_let_in_are_named() -> None:
    environ = {"PENSTOCK_HTTP_CORS_ORIGINS": "https://app.example.com, http://localhost:3000"}
    sites = ("https://app.example.com", "http://localhost:3000")
    assert load(environ=environ).http.cors_origins == sites


@pytest.mark.parametrize("origin", ["*", "null", "app.example.com", "https://a.example/path", ""])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        Config(http=HttpOptions(cors_origins=(origin,))).validate()
    assert refused.value.field == "http.cors_origins"


@pytest.mark.parametrize("name", ["*", "https://a.example", "a.example:80", "a b", "", ".example"])
def test_what_is_no_name_of_a_host_is_refused(name: str) -> None:
    assert Config(http=HttpOptions(hosts=("queue.example", "::1", "a"))).validate()
    with pytest.raises(InvalidArgument) as refused:
        Config(http=HttpOptions(hosts=(name,))).validate()
    assert refused.value.field == "http.hosts"


@pytest.mark.parametrize("key", ["k", "0123456789abcdef" * 2 + "x" * 4096, "x" * 64, "01" * 32])
def test_a_cluster_s_key_that_can_be_guessed_is_refused(key: str) -> None:
    """Before, one letter would do."""
    with pytest.raises(InvalidArgument, match="openssl rand -hex 32") as refused:
        Config(cluster=ClusterOptions(key=key)).validate()
    assert refused.value.field == "cluster.key" and refused.value.limit in (32, 8)
    assert Config(cluster=ClusterOptions(key=secrets.token_hex(16))).validate()
