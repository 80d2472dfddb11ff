"""The `penstock` command. Importing it is cheap: a command loads what it needs when it runs."""

from __future__ import annotations


def main() -> None:
    from penstock.cli.app import run

    run()
