"""The machine of a measurement: what it is, for the record, and a moment of rest."""

import dataclasses
import datetime
import importlib.metadata
import os
import platform
import time
from pathlib import Path
from typing import Any

import jax

from jaxrag.base.installed import commit
from jaxrag.models.forms import forms

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
        "forms": {**dataclasses.asdict(forms()), "heads_apart": [*forms().heads_apart]},
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "commit": commit(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def settle() -> None:
    """Let what ran before come to rest."""
    time.sleep(SETTLE_SECONDS)
