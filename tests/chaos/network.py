"""A network for every process: namespaces on one bridge, and packets that are dropped one way.

Whoever runs the harness is on the bridge too, at `host`, and reaches everybody. A cut drops what
`source` sends to `target` in the target's namespace: connections stay open and hear nothing, as
with a broken switch, and what goes the other way arrives.

Needs root, iproute2 and iptables.
"""

from __future__ import annotations

import re
import secrets
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

HOST: Final = "host"  # the harness itself, with its clients
SUBNETS: Final = range(1, 250)


class Network:
    """Made by `network`; members have an address and a command prefix each."""

    def __init__(self, members: Iterable[str]) -> None:
        self._tag = secrets.token_hex(3)
        self._subnet = _free_subnet()
        self.members = list(members)
        self._cuts: list[tuple[str, str]] = []

    def address(self, member: str) -> str:
        number = 254 if member == HOST else self.members.index(member) + 1
        return f"{self._subnet}.{number}"

    def prefix(self, member: str) -> list[str]:
        """What runs a command in a member's network; the process keeps its pid."""
        return ["nsenter", f"--net=/run/netns/{self._namespace(member)}", "--"]

    def _namespace(self, member: str) -> str:
        return f"penstock-{self._tag}-{member}"

    def _link(self, member: str) -> str:
        return f"ps{self._tag}{self.members.index(member)}"

    @property
    def _bridge(self) -> str:
        return f"psb{self._tag}"

    # --- making it ---

    def open(self) -> None:
        bridge = self._bridge
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "address", "add", f"{self.address(HOST)}/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        for member in self.members:
            space, link = self._namespace(member), self._link(member)
            _run("ip", "netns", "add", space)
            _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
            _run("ip", "link", "set", link, "master", bridge, "up")
            inside = ("ip", "-n", space)
            _run(*inside, "address", "add", f"{self.address(member)}/24", "dev", "eth0")
            _run(*inside, "link", "set", "eth0", "up")
            _run(*inside, "link", "set", "lo", "up")

    def close(self) -> None:
        """Remove all of it, as far as it was made."""
        for member in self.members:
            subprocess.run(
                ["ip", "netns", "delete", self._namespace(member)], capture_output=True, check=False
            )
        subprocess.run(["ip", "link", "delete", self._bridge], capture_output=True, check=False)

    # --- breaking it ---

    def cut(self, source: str, target: str) -> None:
        """Drop what `source` sends to `target`. Cuts add up: each needs a `mend` of its own."""
        self._rule("-I", source, target)
        self._cuts.append((source, target))

    def mend(self, source: str, target: str) -> None:
        self._cuts.remove((source, target))
        self._rule("-D", source, target)

    def mend_all(self) -> None:
        for source, target in list(self._cuts):
            self.mend(source, target)

    def _rule(self, action: str, source: str, target: str) -> None:
        _run(
            *self.prefix(target), "iptables", "-w", action, "INPUT",
            "-s", self.address(source), "-j", "DROP",
        )  # fmt: skip


@contextmanager
def network(members: Iterable[str]) -> Iterator[Network]:
    """A network that does not outlive its block."""
    made = Network(members)
    try:
        made.open()
        yield made
    finally:
        made.close()


def _free_subnet() -> str:
    taken = _run("ip", "-4", "-o", "address").stdout
    for number in SUBNETS:
        subnet = f"10.219.{number}"
        if not re.search(rf"\b{re.escape(subnet)}\.", taken):
            return subnet
    raise RuntimeError("no subnet is free")


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{' '.join(command)}: {error.stderr.strip()}") from error
