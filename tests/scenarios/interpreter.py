"""Runs the transcripts of this folder: a command after `> `, then what came of it.

    python -m tests.scenarios.interpreter tests/scenarios/takeover.txt          compare
    python -m tests.scenarios.interpreter --write tests/scenarios/takeover.txt  write it down

Commands:
    nodes a b c [voters a b]        start nodes; all are voters unless said otherwise
    option credit_entries 2         before the nodes start
    run 2000                        let time pass and deliver everything
    tick 100                        let time pass and deliver nothing
    deliver [a->b] [Kind] [2]       deliver what waits, all of it or what is named, once
    drop / duplicate / defer        lose it, deliver it twice, put it behind the rest
    waiting                         what lies in the network
    put a 2                         append two entries at a coordinator
    hold a / release a              its disk: nothing is synced, promised or cut meanwhile
    crash a / restart a / wipe a    wipe: comes back with an empty disk
    cut a b / isolate a / heal      the network between nodes
    store down / store up           the metadata store
    until joint                     run until the record has two sets
    take a                          it asks for the next epoch, for no reason
    resign a · learner d · target b c d · compact a 3 · writable a · show
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from tests.scenarios.cluster import Cluster, Disk, Letter

from penstock.model.batch import Kind
from penstock.replication.assignment import PartitionRecord

TICK_MS = 100


class Interpreter:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.cluster = Cluster(self.lines.append)

    def run(self, command: str) -> list[str]:
        self.lines.clear()
        name, *args = command.split()
        getattr(self, f"do_{name}")(*args)
        return list(self.lines) or ["ok"]

    # --- nodes ---

    def do_nodes(self, *names: str) -> None:
        at = names.index("voters") if "voters" in names else len(names)
        nodes, voters = names[:at], names[at + 1 :] or names[:at]
        for node in nodes:
            self.cluster.disks[node] = Disk(f"{node}-disk")
        uuids = {node: f"{node}-disk" for node in voters}
        self.cluster.store(PartitionRecord(voters=voters, uuids=uuids))
        for node in nodes:
            self.cluster.start(node)

    def do_option(self, name: str, value: str) -> None:
        self.cluster.set_options(**{name: int(value)})

    def do_crash(self, node: str) -> None:
        self.cluster.crash(node)

    def do_restart(self, node: str) -> None:
        self.cluster.start(node)

    def do_wipe(self, node: str) -> None:
        if node in self.cluster.replicas:
            self.cluster.crash(node)
        self.cluster.disks[node] = Disk(f"{self.cluster.disks[node].uuid}+")
        self.cluster.start(node)

    def do_hold(self, node: str) -> None:
        self.cluster.held[node] = []

    def do_release(self, node: str) -> None:
        self.cluster.release(node)

    # --- time and messages ---

    def do_run(self, ms: str) -> None:
        self.cluster.quiesce()
        for _ in range(int(ms) // TICK_MS):
            self.cluster.tick(TICK_MS)
            self.cluster.quiesce()

    def do_tick(self, ms: str) -> None:
        self.cluster.tick(int(ms))
        self.do_waiting()

    def do_waiting(self) -> None:
        self.lines += [f"~ {letter}" for letter in self.cluster.network if letter.source != "store"]

    def chosen(self, args: tuple[str, ...]) -> list[Letter]:
        """What is named of that which waits, taken out of the network."""
        way = next((a for a in args if "->" in a), "")
        kind = next((a for a in args if a.isalpha()), "")
        count = next((int(a) for a in args if a.isdigit()), len(self.cluster.network))
        source, _, to = way.partition("->")
        chosen = [
            letter
            for letter in self.cluster.network
            if (not way or letter[:2] == (source, to))
            and kind in ("", type(letter.message).__name__)
        ][:count]
        self.cluster.network = [x for x in self.cluster.network if not any(x is c for c in chosen)]
        return chosen

    def do_deliver(self, *args: str) -> None:
        for letter in self.chosen(args):
            if letter.source != "store":
                self.lines.append(str(letter))
            self.cluster.deliver(letter)

    def do_drop(self, *args: str) -> None:
        self.lines += [f"lost: {letter}" for letter in self.chosen(args)]

    def do_duplicate(self, *args: str) -> None:
        for letter in self.chosen(args):
            self.cluster.network += [letter, letter]

    def do_defer(self, *args: str) -> None:
        """The first of what is named comes last."""
        chosen = self.chosen(args)
        self.cluster.network += [*chosen[1:], chosen[0]]

    def do_cut(self, one: str, other: str) -> None:
        self.cluster.cuts.add(frozenset((one, other)))

    def do_isolate(self, node: str) -> None:
        for other in self.cluster.disks:
            self.do_cut(node, other)

    def do_heal(self) -> None:
        self.cluster.cuts.clear()

    def do_store(self, state: str) -> None:
        self.cluster.metadata = state == "up"
        for node in self.cluster.replicas if state == "up" else ():
            self.cluster.told(node)

    # --- what an operator or a client does ---

    def do_put(self, node: str, count: str) -> None:
        for _ in range(int(count)):
            self.cluster.append(node, Kind.ENQ)

    def do_take(self, node: str) -> None:
        self.cluster.take_epoch(node)

    def do_until(self, condition: str) -> None:
        while not getattr(self.cluster.record, condition):
            if self.cluster.network:
                self.cluster.deliver(self.cluster.network.pop(0))
            else:
                self.cluster.tick(TICK_MS)

    def do_resign(self, node: str) -> None:
        cluster = self.cluster
        cluster.perform(node, cluster.replicas[node].resign(cluster.now))

    def do_target(self, *nodes: str) -> None:
        self.edit(target=nodes)

    def do_learner(self, *nodes: str) -> None:
        self.edit(learners=nodes)

    def edit(self, **lists: tuple[str, ...]) -> None:
        cluster = self.cluster
        cluster.store(msgspec.structs.replace(cluster.record, **lists))
        for node in cluster.replicas:
            cluster.told(node)

    def do_compact(self, node: str, through: str) -> None:
        """Everything up to there is kept as a snapshot only."""
        cluster = self.cluster
        disk, log = cluster.disks[node], cluster.replicas[node].log
        at = int(through)
        disk.runs_base = [(log.epoch_at(at) or 0, at)]
        disk.batches = [b for b in disk.batches if b.first > at]
        disk.first = at + 1
        log.first = at + 1

    def do_writable(self, node: str) -> None:
        why = self.cluster.replicas[node].writable(self.cluster.now)
        self.lines.append(f"{type(why).__name__}: {why}" if why else "yes")

    def do_show(self) -> None:
        for node, disk in self.cluster.disks.items():
            machine = self.cluster.replicas.get(node)
            if machine is None:
                self.lines.append(f"{node} is down")
                continue
            log = " ".join(str(machine.log.epoch_at(n) or "-") for n in range(1, disk.last + 1))
            self.lines.append(
                f"{node} {machine.role.value} {machine.epoch}: log {log or 'empty'},"
                f" durable {disk.durable}, committed {machine.committed}, promised {disk.promised}"
            )


def play(text: str) -> str:
    """The transcript as it really is: the comments and commands, with what comes of them."""
    interpreter = Interpreter()
    played: list[str] = []
    for line in text.splitlines():
        if line.startswith("> "):
            played += [line, *(f"  {said}" for said in interpreter.run(line[2:]))]
        elif not line.startswith("  "):
            played.append(line)
    return "\n".join(played) + "\n"


def main(argv: list[str]) -> int:
    paths = [Path(arg) for arg in argv if arg != "--write"]
    wrong = 0
    for path in paths:
        text = path.read_text()
        played = play(text)
        wrong += played != text
        if "--write" in argv:
            path.write_text(played)
        else:
            print(played)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
