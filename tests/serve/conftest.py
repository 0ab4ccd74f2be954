"""Several processes that run one program on simulated devices."""

import os
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import pytest

from jaxrag.models.export import export_hf
from jaxrag.models.reading import Reading
from jaxrag.models.spec import init_params

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def wide_model_dir(tmp_path_factory, tiny_config, tokenizer_dir):
    """Four KV heads, so that four devices can split them."""
    config = tiny_config(
        vocab_size=600, num_layers=2, num_heads=8, num_kv_heads=4, max_positions=512
    )
    folder = tmp_path_factory.mktemp("wide") / "llama"
    params = init_params(config, jax.random.key(5))
    export_hf(folder, params, config, tokenizer_dir, reading=Reading(("reordered",)))
    return folder


@pytest.fixture(scope="session")
def run_processes() -> Callable[..., list[str]]:
    """``run_processes(command, folder, count=2, devices=2, code=0, timeout=300)``; see ``_run``."""
    return _run


def _free_port() -> int:
    """A port of this machine that nobody listens on at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _run(
    command: Callable[[int, str], Sequence[str]],
    folder: Path,
    *,
    count: int = 2,
    devices: int = 2,
    code: int = 0,
    timeout: float = 300,
) -> list[str]:
    """Run ``command(rank, coordinator)`` in ``count`` processes; what each printed.

    When one of them ends with another exit code than ``code``, or time is up, all are killed, and
    AssertionError shows their stderr.
    """
    coordinator = f"127.0.0.1:{_free_port()}"
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    }
    started, deadline = [], time.monotonic() + timeout
    try:
        for rank in range(count):
            with (
                (folder / f"out-{rank}").open("wb") as out,
                (folder / f"err-{rank}").open("wb") as err,
            ):
                started.append(
                    subprocess.Popen(
                        command(rank, coordinator),
                        cwd=folder,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=err,
                    )
                )
        while any(one.poll() is None for one in started) and time.monotonic() < deadline:
            if any(one.poll() not in (None, code) for one in started):
                time.sleep(1)  # the others may say why
                break
            time.sleep(0.05)
        codes = [one.poll() for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()
    errors = [
        f"--- rank {rank}: exit code {code}\n{(folder / f'err-{rank}').read_text()[-4000:]}"
        for rank, code in enumerate(codes)
    ]
    assert codes == [code] * count, "\n".join(errors)
    return [(folder / f"out-{rank}").read_text() for rank in range(count)]
