"""The first frame of a connection: what is spoken on it, and in whose name."""

from __future__ import annotations

import hmac
from typing import NamedTuple

from penstock.errors import Corruption, InvalidArgument, Unauthenticated
from penstock.model.version import __version__
from penstock.node.engine import Engine
from penstock.wire.frame import Frame, FrameFlag, FrameType
from penstock.wire.messages import Hello, Welcome, unpack
from penstock.wire.negotiation import choose_codec, choose_version


class Greeting(NamedTuple):
    welcome: Welcome
    key_id: str | None
    peer: bool  # another node of the cluster, as far as we can tell


def read_greeting(engine: Engine, frame: Frame) -> Greeting:
    """What a connection's first frame agrees on; raises what it is refused with."""
    if frame.type is not FrameType.HEARTBEAT:
        engine.metrics.auth_failed()
        raise Unauthenticated("the first frame must be a greeting")
    if frame.flags & FrameFlag.COMPRESSED:
        raise InvalidArgument("a greeting is not compressed", field="flags")
    try:
        hello, _ = unpack(frame.payload, Hello)
    except Corruption as error:
        raise InvalidArgument(error.message, field="payload") from error
    version, codec = choose_version(hello.versions), choose_codec(hello.codecs)
    try:
        key_id, peer = _authenticated(engine, hello.api_key)
    except Unauthenticated:
        engine.metrics.auth_failed()
        raise
    limits, name = engine.config.limits, engine.config.cluster_name
    heartbeat_ms = int(limits.idle_s * 1000 / 3)
    welcome = Welcome(
        version, __version__, engine.identity.node, heartbeat_ms, limits.frame_bytes_max, name,
        codec,
    )  # fmt: skip
    return Greeting(welcome, key_id, peer)


def _authenticated(engine: Engine, key: str | None) -> tuple[str | None, bool]:
    config = engine.config
    cluster_key = config.cluster.key
    if cluster_key and key and hmac.compare_digest(key.encode(), cluster_key.encode()):
        return "cluster", True
    key_id = None
    if key is not None or config.keys_required:
        key_id = engine.keys.verify(key)
    return key_id, not cluster_key and not config.keys_required
