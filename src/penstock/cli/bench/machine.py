"""Facts about the machine, so that two results can be compared."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path
from typing import Any


def machine_facts(folder: Path) -> dict[str, Any]:
    from penstock import __version__
    from penstock.cli.doctor import check_fsync

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "penstock": __version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mb": memory // 1_000_000,
        "disk_free_mb": shutil.disk_usage(folder).free // 1_000_000,
        "fsync": check_fsync(folder).detail,
        "load_1m": round(os.getloadavg()[0], 2),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
