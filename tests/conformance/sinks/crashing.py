"""A process that writes triggers into a sink until it is killed: `python -m … <kind> <where>`.

It prints the number of each trigger once `write` has returned.
"""

from __future__ import annotations

import sys

from tests.conformance.sinks.changes import Triggers

from penstock.sinks.protocol import Sink, sink_class

TRIGGERS = 100


def sink_of(kind: str, where: str) -> Sink:
    """Only the library of this kind is loaded: most of the process's life is imports."""
    options = {
        "lake": {"path": where, "pipeline": "pipeline"},
        "index": {"path": where, "tidy_every": 2},
        "cache": {"url": where},
    }
    sink: Sink = sink_class(kind)(kind, **options[kind])
    return sink


def main(kind: str, where: str) -> None:
    sink = sink_of(kind, where)
    sink.open()
    triggers = Triggers.of(TRIGGERS)
    for number in range(TRIGGERS):
        sink.write(triggers.work(number))
        print(number, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
