"""The `penstock` command. Importing it is cheap: a command loads what it needs when it runs.

`app` is the tree of commands, and each module or folder holds the commands of one subject. A
command is a function of the options that all share; it returns one answer, for a script or for a
person, and `command` turns what it raises into an exit code. Nothing below imports this
package.
"""

from __future__ import annotations


def main() -> None:
    from penstock.cli.app import run

    run()
