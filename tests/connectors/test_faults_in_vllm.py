"""vLLM over a store that fails: `make test-vllm VLLM_PYTHON=...`.

JAXRAG_VLLM_REQUESTS sets how many random requests there are (150).
"""

import dataclasses
import hashlib
import itertools
import os
import shutil
import signal
import subprocess
import time

import pytest
from random_cases import COUNT
from test_in_vllm import CONFIG, command, made, result

from jaxrag.connectors import manifest
from jaxrag.serve.connector_files import write_manifest

__all__ = ["made"]
pytestmark = pytest.mark.vllm
REQUESTS = int(os.environ.get("JAXRAG_VLLM_REQUESTS", "150"))
SLOW = {"class": ("Slow", "slow_store")}
assert CONFIG.dtype == "float32"


@pytest.fixture
def copied(made, tmp_path):
    """Its own store, and the manifest of it."""
    folder, data = made
    shutil.copytree(folder / "store", tmp_path / "store")
    known = manifest.read(folder / "manifest")
    engine = dataclasses.replace(known.engine, store=str(tmp_path / "store"))
    write_manifest(tmp_path / "manifest", dataclasses.replace(known, engine=engine))
    job = {"manifest": str(tmp_path / "manifest"), "store": str(tmp_path / "store"), **SLOW}
    return folder, data, job


def test_random_requests_while_the_store_fails(copied, tmp_path):
    folder, data, job = copied
    longest = max(map(len, prompts_of(data))) + COUNT
    blocks = -(-longest // 32)  # of 32 tokens
    # Room for two or three: answers that grow then have some of them preempted.
    engine = {"num_gpu_blocks_override": 2 * blocks, "max_model_len": 32 * blocks}
    extra = {"deadline": 1.0}
    job |= {"requests": REQUESTS, "seed": 5, "engine": engine, "extra": extra}
    started = command(folder, job, "chaos_in_vllm.py", JAXRAG_SLOW=str(tmp_path / "slow"))
    said = result(subprocess.run(**started, capture_output=True, text=True))
    print(said)
    for name in ("wrong", "late", "hung", "exact that were stored", "running", "waiting", "usage"):
        assert said.get(name, 0) == 0, said
    assert said["preemptions"] >= REQUESTS // 60  # how many there are is a matter of time
    assert said["aborted"] >= REQUESTS // 8
    assert said["none: stored"] >= REQUESTS // 25
    reasons = ("flipped: damaged", "missing: missing", "slow: late")
    assert all(said.get(name) for name in reasons), said
    assert any(name.startswith("down: ") and "stored" not in name for name in said), said


def test_killed_while_it_loads_no_byte_of_the_store_changes(copied, tmp_path):
    folder, _, job = copied
    before = contents(tmp_path / "store")
    slow = tmp_path / "slow"
    slow.touch()
    job |= {"steps": [{"how": "spans", "batch": True}], "extra": {"deadline": 60.0}}
    started = command(folder, job, JAXRAG_SLOW=str(slow))
    process = subprocess.Popen(
        **started, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    until = time.monotonic() + 240
    while not slow.with_suffix(".reading").exists():
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert contents(tmp_path / "store") == before


def prompts_of(data):
    """The token ids of each case."""
    for case in data["cases"]:
        chunks = (data["chunks"][at] for at in case["chunks"])
        yield [*data["prefix"], *itertools.chain(*chunks), *case["final"]]


def contents(folder):
    """A digest of each file, by path."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
