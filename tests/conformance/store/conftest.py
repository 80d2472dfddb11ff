"""The stores that the suite runs on: a folder, and a bucket of a real S3 server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.s3 import make_bucket, s3_server

from penstock.spark.store import StoreAddress


@pytest.fixture(scope="session")
def s3() -> Iterator[dict[str, str]]:
    with s3_server() as options:
        yield options


@pytest.fixture(params=["folder", "s3"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> StoreAddress:
    if request.param == "folder":
        return StoreAddress(url=str(tmp_path / "store"))
    options = request.getfixturevalue("s3")
    return StoreAddress(url=f"s3://{make_bucket(options)}/some/place", options=options)
