from pathlib import Path

import pytest

from penstock.cluster.etcd import EtcdStore
from penstock.errors import Unavailable
from penstock.testing.etcd import etcd_process, etcd_program
from penstock.testing.process import PORTS, free_ports


def test_without_a_program_it_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="etcd-server"):
        etcd_program()


def test_ports_are_below_the_ephemeral_ones() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5 and set(ports) <= set(PORTS) and max(PORTS) < 32768


async def test_a_killed_server_comes_back_with_its_data(tmp_path: Path) -> None:
    with etcd_process(tmp_path) as server:
        store = EtcdStore([server.endpoint], prefix="/test/")
        await store.put("a", b"1")
        server.kill()
        server.start()
        entry = await store.get("a")
        assert entry is not None and entry.value == b"1"
        await store.close()


def test_a_server_that_cannot_start_is_reported(tmp_path: Path) -> None:
    with etcd_process(tmp_path) as server:
        server.stop()
        (server.folder / "data").rename(server.folder / "moved")
        (server.folder / "data").write_text("no folder")
        with pytest.raises(Unavailable, match=r"etcd\.log"):
            server.start()
