"""Which Java runs Spark."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from penstock.errors import FailedPrecondition
from penstock.spark import session


def runtime(home: Path, version: str, *, modules: str = "java.base jdk.incubator.vector") -> Path:
    """A folder that looks like a Java; its `java` prints its arguments."""
    (home / "bin").mkdir(parents=True)
    program = home / "bin" / "java"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    (home / "release").write_text(f'JAVA_VERSION="{version}"\nMODULES="{modules}"\n')
    return home


def test_the_users_own_java_comes_first(tmp_path: Path) -> None:
    own, found = runtime(tmp_path / "own", "21.0.2"), runtime(tmp_path / "path", "17.0.1")
    environ = {"JAVA_HOME": str(own), "PATH": str(found / "bin")}

    assert session.java_home(environ) == own
    assert session.java_home({"PATH": environ["PATH"]}) == found


def test_one_that_is_too_old_is_passed_over(tmp_path: Path) -> None:
    old, new = runtime(tmp_path / "old", "1.8.0_392"), runtime(tmp_path / "new", "17.0.1")
    environ = {"JAVA_HOME": str(old), "PATH": str(new / "bin")}

    assert session.java_version(old) == 8
    assert session.java_home(environ) == new


def test_without_any_the_one_from_pypi_is_wrapped(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path), "PENSTOCK_CACHE": str(tmp_path / "cache")}

    home = session.java_home(environ)

    assert home.is_relative_to(tmp_path / "cache")
    answer = subprocess.run(
        [home / "bin" / "java", "--add-modules=jdk.incubator.vector", "-version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "version" in answer.stderr
    assert session.java_home(environ) == home


def test_a_wrapper_hands_every_other_argument_on(tmp_path: Path) -> None:
    home = runtime(tmp_path / "it's own", "25", modules="java.base")
    environ = {"JAVA_HOME": str(home), "PENSTOCK_CACHE": str(tmp_path / "cache")}
    wrapper = session.java_home(environ) / "bin" / "java"

    arguments = ["-Da=b c", "--add-modules=jdk.incubator.vector", "", "x*"]
    answer = subprocess.run([wrapper, *arguments], capture_output=True, text=True, check=True)

    assert answer.stdout.split("\n") == ["-Da=b c", "", "x*", ""]


def test_what_was_looked_at_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session.importlib.util, "find_spec", lambda name: None)
    old = runtime(tmp_path / "old", "11.0.1")

    with pytest.raises(FailedPrecondition, match="JAVA_HOME has Java 11"):
        session.java_home({"JAVA_HOME": str(old), "PATH": ""})


def test_the_cache_is_the_users(tmp_path: Path) -> None:
    assert session.cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/penstock")
    assert session.cache_folder({"PENSTOCK_CACHE": "/y", "XDG_CACHE_HOME": "/x"}) == Path("/y")
    assert session.cache_folder({}) == Path.home() / ".cache" / "penstock"
