"""The first frame of a connection: what is spoken on it, and in whose name."""

from __future__ import annotations

import hmac
from typing import NamedTuple

from penstock.errors import Corruption, InvalidArgument, Unauthenticated
from penstock.model.version import __version__
from penstock.node.calls.table import CLUSTER_KEY_ID
from penstock.node.engine import Engine
from penstock.wire.compression import choose_codec
from penstock.wire.frame import Frame, FrameFlag, FrameType, choose_version
from penstock.wire.messages import Hello, Welcome, unpack


class Greeting(NamedTuple):
    welcome: Welcome
    key_id: str | None
    peer: bool  # another node of the cluster, as far as we can tell


def read_greeting(engine: Engine, frame: Frame) -> Greeting:
    """What a connection's first frame agrees on; raises what it is refused with."""
    if frame.type is not FrameType.HEARTBEAT:
        engine.metrics.auth_failures.add()
        raise Unauthenticated("the first frame must be a greeting")
    if frame.flags & FrameFlag.COMPRESSED:
        raise InvalidArgument("a greeting is not compressed", field="flags")
    try:
        hello, _ = unpack(frame.payload, Hello)
    except Corruption as error:
        raise InvalidArgument(error.message, field="payload") from error
    version, codec = choose_version(hello.versions), choose_codec(hello.codecs)
    try:
        key_id, peer = _authenticated(engine, hello)
    except Unauthenticated:
        engine.metrics.auth_failures.add()
        raise
    limits, name = engine.config.limits, engine.config.cluster_name
    heartbeat_ms = int(limits.idle_s * 1000 / 3)
    welcome = Welcome(
        version, __version__, engine.identity.node, heartbeat_ms, limits.frame_bytes_max, name,
        codec,
    )  # fmt: skip
    return Greeting(welcome, key_id, peer)


def _authenticated(engine: Engine, hello: Hello) -> tuple[str | None, bool]:
    """The caller's key, and whether it counts as a node. Nodes show the cluster's key in a field of
    its own; as an API key it is as good as any wrong one. In a cluster that has no key everybody
    who connects may be a node, which only one on loopback can be."""
    config = engine.config
    cluster_key = config.cluster.key
    if hello.cluster_key is not None:
        shown = hello.cluster_key.encode()
        if not cluster_key or not hmac.compare_digest(shown, cluster_key.encode()):
            raise Unauthenticated("this is not the cluster's key")
        return CLUSTER_KEY_ID, True
    key_id = None
    if hello.api_key is not None or config.keys_required:
        key_id = engine.keys.verify(hello.api_key)
    return key_id, config.cluster.enabled and not cluster_key and not config.keys_required
