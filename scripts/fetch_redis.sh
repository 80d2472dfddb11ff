#!/bin/sh
# Put the program redis-server into the virtual environment $1, for demo, benchmarks and tests.
#
# A server that is installed is used as it is. Otherwise Debian's package, which gets its security
# updates, is unpacked below the environment: nothing is installed, no service starts with the machine,
# and root is not needed, because apt works on lists and archives of its own.
set -eu

venv="$(cd "$1" && pwd)"
folder="$venv/redis"
program="$folder/redis-server"
mkdir -p "$folder"

for name in redis-server valkey-server; do
    if found="$(command -v "$name")"; then
        ln -sf "$found" "$program"
        exit 0
    fi
done

if ! command -v apt-get >/dev/null 2>&1; then
    echo "setup: no redis-server on the PATH, and no apt-get to fetch it with: install Redis or Valkey" >&2
    exit 1
fi

apt="$folder/apt"
unpacked="$folder/unpacked"
rm -rf "$apt" "$unpacked"
mkdir -p "$apt/lists/partial" "$apt/archives/partial" "$unpacked"
trap 'rm -rf "$apt"' EXIT

own="-o Dir::State::lists=$apt/lists -o Dir::Cache=$apt -o Debug::NoLocking=1 -o APT::Sandbox::User=root"
# shellcheck disable=SC2086 - a list of options
apt-get $own -qq update
# It fetches the server and those of its libraries that this machine lacks.
# shellcheck disable=SC2086
apt-get $own -qq -y --no-install-recommends --download-only install redis-server >/dev/null
for package in "$apt"/archives/*.deb; do
    dpkg-deb -x "$package" "$unpacked"
done

libraries="$(find "$unpacked" -name '*.so.*' -exec dirname {} \; | sort -u | paste -sd: -)"
cat >"$program.part" <<END
#!/bin/sh
LD_LIBRARY_PATH="$libraries\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}" exec "$unpacked/usr/bin/redis-server" "\$@"
END
chmod 755 "$program.part"
"$program.part" --version
mv "$program.part" "$program"
