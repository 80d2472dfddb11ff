"""What two ends agree on in a greeting: the version of the protocol, and how frames are compressed.

The frames of the greeting itself are version 1, whatever is offered in them; so ends of different
ages understand at least why they do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.errors import InvalidArgument
from penstock.model.batch import Codec
from penstock.wire.frame import VERSION

VERSIONS: Final = (VERSION,)  # of the protocol, that this software speaks
CODECS: Final = {"zstd": Codec.ZSTD, "lz4": Codec.LZ4}
_SHOWN: Final = 8  # offered versions that a refusal repeats


def choose_version(offered: Sequence[int], spoken: Sequence[int] = VERSIONS) -> int:
    """The highest version that both ends speak."""
    common = set(offered).intersection(spoken)
    if not common:
        shown = ", ".join(map(str, offered[:_SHOWN])) or "none"
        raise InvalidArgument(
            f"versions {', '.join(map(str, spoken))} are spoken here, not {shown}",
            field="versions",
            versions=list(spoken),
        )
    return max(common)


def choose_codec(offered: Sequence[str], spoken: Sequence[str] = tuple(CODECS)) -> str:
    """The first codec that is offered and known here; none: frames stay as they are."""
    return next((name for name in offered if name in spoken), "")
