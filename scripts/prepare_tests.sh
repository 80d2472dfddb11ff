#!/bin/sh
# What the tests need besides .venv: they break real file systems, networks and system calls, which
# takes root, mount, mkfs.ext4, ip, iptables, strace and libfaketime, and start etcd servers of their own. Fetches
# the Debian packages that are missing; says so when it cannot.
set -eu

as_root=""
if [ "$(id -u)" -ne 0 ]; then
    if command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
        as_root="sudo"
    else
        echo "make test mounts small file systems to break them: run it as root" >&2
        exit 1
    fi
fi

PATH="$PATH:/usr/sbin:/sbin"
missing=""
command -v mount >/dev/null 2>&1 || missing="$missing mount"
command -v mkfs.ext4 >/dev/null 2>&1 || missing="$missing e2fsprogs"
command -v ip >/dev/null 2>&1 || missing="$missing iproute2"
command -v iptables >/dev/null 2>&1 || missing="$missing iptables"
command -v strace >/dev/null 2>&1 || missing="$missing strace"
ls /usr/lib/*/faketime/libfaketime.so.1 >/dev/null 2>&1 || missing="$missing libfaketime"
etcd=""
command -v etcd >/dev/null 2>&1 || etcd="etcd-server"
if [ -n "$missing$etcd" ]; then
    echo "installing:$missing $etcd"
    $as_root apt-get update -qq
fi
if [ -n "$missing" ]; then
    # shellcheck disable=SC2086 - a list of packages
    $as_root apt-get install -y -qq --no-install-recommends $missing
fi
# Installing the package would start a server with every boot; only its program is wanted.
if [ -n "$etcd" ]; then
    folder="$(mktemp -d)"
    trap 'rm -rf "$folder"' EXIT
    (cd "$folder" && apt-get -o APT::Sandbox::User=root download -qq "$etcd" && dpkg-deb -x ./*.deb unpacked)
    $as_root install -m 755 "$folder/unpacked/usr/bin/etcd" /usr/local/bin/etcd
fi
