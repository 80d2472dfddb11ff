"""Serving without the gateway's packages."""

import sys

import pytest

from penstock.errors import FailedPrecondition
from penstock.server.serve import load_gateway


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith(("penstock.server.g", "grpc"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(FailedPrecondition, match=r"penstock\[gateway\] \(grpc is missing\)"):
        load_gateway()
