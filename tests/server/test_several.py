"""A server whose model lies in two processes: `jaxrag serve --distributed`."""

import contextlib
import os
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from jaxrag import KnowledgeBase

ROOT = Path(__file__).parents[2]
LONG = 300.0
NAMES = ["Kora Felell", "Dovia Bavin", "Bada Fivin", "Liva Bimer", "Rino Dirow"]
QUESTIONS = [
    form.format(name)
    for name in NAMES
    for form in ("Which animal does {} keep?", "Where does {} live?", "Who was taught by {}?")
]
CONFIG = "classes = 2\nrows = 4\n[model]\ncache_tokens = 512\n"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def started(village, folder, *more):
    """Both processes, and a client of the first."""
    (folder / "serve.toml").write_text(CONFIG, encoding="utf-8")
    coordinator = f"127.0.0.1:{free_port()}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1"}
    ranks = []
    try:
        for rank in range(2):
            command = [
                *(sys.executable, "-m", "jaxrag", "serve", "--kb", f"village={village}"),
                *("--port", "0", "--name", "synthetic", "--no-warm-up"),
                *("--config", folder / "serve.toml", "--distributed", "--processes", "2"),
                *("--coordinator", coordinator, "--process-id", str(rank), *more),
            ]
            with (folder / f"err-{rank}").open("wb") as err:
                ranks.append(
                    subprocess.Popen(
                        command, stdout=subprocess.PIPE, stderr=err, cwd=ROOT, env=environment
                    )
                )
        banner = ranks[0].stdout.readline().decode()
        while banner and "http://" not in banner:  # what the collectives' library prints
            banner = ranks[0].stdout.readline().decode()
        urls = [word for word in banner.split() if word.startswith("http://")]
        assert urls, [(folder / f"err-{rank}").read_text()[-2000:] for rank in range(2)]
        with httpx.Client(base_url=urls[0], timeout=LONG) as client:
            yield ranks, client
    finally:
        for one in ranks:
            one.kill()
            one.wait()
            one.stdout.close()


def body(question, **more):
    return {
        "model": "synthetic@village",
        "messages": [{"role": "user", "content": question}],
        "k": 3,
        "max_tokens": 8,
        **more,
    }


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("seed", range(10))
def test_a_rank_that_is_killed_ends_all_with_one_line(village, tmp_path, rank, seed):
    with started(village, tmp_path) as (ranks, client):
        over, answers = threading.Event(), []

        def ask():
            draw = random.Random(seed)
            while not over.is_set():
                with contextlib.suppress(httpx.TransportError):
                    asked = body(draw.choice(QUESTIONS), max_tokens=64, ignore_eos=True)
                    answers.append(client.post("/v1/chat/completions", json=asked))

        asking = threading.Thread(target=ask)
        asking.start()
        time.sleep(1 + 4 * random.Random(seed).random())
        ranks[rank].kill()
        killed = time.monotonic()
        assert ranks[1 - rank].wait(300) != 0
        seconds = time.monotonic() - killed
        over.set()
        asking.join()
        assert seconds < 10
        err = (tmp_path / f"err-{1 - rank}").read_text().splitlines()
        said = [line for line in err if line.startswith("jaxrag: error: ")]
        assert len(said) == 1
        if rank == 1:
            failed = [it.json()["error"] for it in answers if it.status_code != 200]
            known = ("rank 1 ended", "the server is ending")  # for who was served, and who came
            assert [it for it in failed if not it["message"].startswith(known)] == []
    with KnowledgeBase.open(village) as kb:
        assert kb.verify().ok
