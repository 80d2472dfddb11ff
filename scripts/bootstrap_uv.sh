#!/bin/sh
# Put a pinned uv into the folder $1, starting from nothing but a Python interpreter.
set -eu

target=$1
python=${PYTHON:-python3}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "setup: $python must be Python 3.11 or newer; name another with make PYTHON=..." >&2
    exit 1
fi

rm -rf "$target"

# Debian ships python3 without ensurepip, where `venv` exists but cannot finish.
if "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    "$python" -m venv "$target"
    "$target/bin/python" -m pip install --quiet --disable-pip-version-check "uv==$UV_VERSION"
elif "$python" -m pip --version >/dev/null 2>&1; then
    "$python" -m pip install --quiet --disable-pip-version-check \
        --target "$target" "uv==$UV_VERSION"
else
    echo "setup: $python has neither ensurepip nor pip." >&2
    echo "setup: on Debian or Ubuntu: apt-get install python3-venv" >&2
    exit 1
fi

"$target/bin/uv" --version
