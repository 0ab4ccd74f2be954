"""The machine of a measurement: what it is, for the record, and a moment of rest."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("jaxrag", "jax", "jaxlib", "numpy", "tensorstore")
SETTLE_SECONDS = 1.0  # idle worker threads of one process spin for a while and slow the other's


def describe() -> dict[str, Any]:
    """Machine, package versions, commit of the working tree and time, JSON-able."""
    device = jax.devices()[0]
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "device": f"{device.platform}: {device.device_kind}",
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "commit": _commit(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _commit() -> str:
    """The commit of the source tree, with "+changes" where it differs; "unknown" outside git."""
    tree = Path(__file__).parents[2]
    git = ["git", "-C", str(tree)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        changes = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True
        )
    except OSError:
        return "unknown"
    if head.returncode:
        return "unknown"
    return head.stdout.strip() + ("+changes" if changes.stdout.strip() else "")


def settle() -> None:
    """Let what ran before come to rest."""
    time.sleep(SETTLE_SECONDS)
