"""A server that is killed while files come: what it acknowledged is there, and it serves again."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import numpy as np

ROOT = Path(__file__).parents[2]
LONG = 300.0  # seconds in which what must happen happens
WORDS = ["amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath", "larch"]


@contextlib.contextmanager
def process(village, data):
    """A server of its own process, with a client; killed where the block is left."""
    config = data.parent / "serve.toml"
    config.write_text("index_threads = 1\n", encoding="utf-8")
    command = [sys.executable, "-m", "jaxrag", "serve", "--kb", f"village={village}", "--port", "0",
               "--name", "synthetic", "--data", str(data), "--no-warm-up",
               "--config", str(config)]  # fmt: skip
    started = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        banner = started.stdout.readline()
        url = next(word for word in banner.split() if word.startswith("http://"))
        with httpx.Client(base_url=url, timeout=LONG) as client:
            yield started, client
    finally:
        started.kill()
        started.wait()
        started.stdout.close()


def content(number):
    """A document of its own words, of some pages."""
    rng = np.random.default_rng(number)
    lines = (" ".join(rng.choice(WORDS, 12)) + "." for _ in range(40))
    return f"Number{number} begins. {' '.join(lines)} Number{number} ends.".encode()


class Client(threading.Thread):
    """Uploads files and puts them into a vector store, until its server is gone."""

    def __init__(self, client, store, numbers):
        super().__init__()
        self._client, self._store, self._numbers = client, store, numbers
        self.files, self.members, self.removed = {}, [], []
        self.doubtful = set()  # of whom nobody heard
        self.changed = threading.Condition()

    def run(self):
        with contextlib.suppress(httpx.TransportError):
            for number in self._numbers:
                files = {"file": (f"{number}.txt", content(number))}
                made = self._client.post("/v1/files", files=files).json()["id"]
                with self.changed:
                    self.files[made] = number
                    self.changed.notify_all()
                path = f"/v1/vector_stores/{self._store}/files"
                assert self._client.post(path, json={"file_id": made}).status_code == 200
                self.members.append(made)
                if number % 5 == 4:
                    self.doubtful.add(made)
                    self._client.delete(f"{path}/{made}").raise_for_status()
                    self.members.remove(made)
                    self.removed.append(made)
                    self.doubtful.remove(made)

    def uploaded(self, count):
        """Wait for so many acknowledged uploads."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.files) >= count, LONG)


def check(client, store, known):
    """All that was acknowledged is there, whole and found; what is more is whole, too."""
    listed = client.get("/v1/files").json()["data"]
    names = {file["id"]: int(file["filename"].removesuffix(".txt")) for file in listed}
    assert known.files.items() <= names.items()
    for file, number in names.items():
        assert client.get(f"/v1/files/{file}/content").content == content(number)
    path = f"/v1/vector_stores/{store}"
    deadline = time.monotonic() + LONG
    while client.get(path).json()["status"] == "in_progress" and time.monotonic() < deadline:
        time.sleep(0.05)
    members = client.get(f"{path}/files", params={"limit": 100}).json()
    there = {member["id"]: member for member in members["data"]}
    while members["has_more"]:
        after = {"limit": 100, "after": members["last_id"]}
        members = client.get(f"{path}/files", params=after).json()
        there |= {member["id"]: member for member in members["data"]}
    assert set(known.members) - known.doubtful <= there.keys()
    assert not set(known.removed) & there.keys()
    for file in there:
        assert there[file]["status"] == "completed", there[file]
        asked = {"query": f"Number{names[file]} ends", "max_num_results": 5}
        found = client.post(f"{path}/search", json=asked).json()["data"]
        assert found[0]["file_id"] == file
    for file in known.removed:
        asked = {"query": f"Number{names[file]} ends", "max_num_results": 50}
        found = client.post(f"{path}/search", json=asked).json()["data"]
        assert file not in {hit["file_id"] for hit in found}


def killed(village, data, store, first, seconds):
    """What a server acknowledged that is killed so long after its first uploads; and the store."""
    with process(village, data) as (started, client):
        if store is None:
            store = client.post("/v1/vector_stores", json={"name": "kept"}).json()["id"]
        busy = Client(client, store, range(first, first + 1000))
        busy.start()
        busy.uploaded(2)
        time.sleep(seconds)
        started.kill()
        busy.join()
    return busy, store


def answers(client):
    """It serves."""
    body = {"messages": [{"role": "user", "content": "Which animal does Kora Felell keep?"}]}
    answer = client.post("/v1/chat/completions", json={**body, "k": 3}).json()
    assert answer["choices"][0]["message"]["content"] == "falcon"


def test_a_killed_server_lost_nothing_that_it_acknowledged(
    running, served_model, village, tmp_path
):
    data = tmp_path / "data"
    known, store = killed(village, data, None, 0, 0.0)
    with running(served_model, {"village": village}, data=str(data), index_threads=1) as again:
        check(again.client, store, known)
        answers(again.client)
    kept = {path.name for path in (data / "tenants").rglob("files/*")}
    assert set(known.files) <= kept and not [name for name in kept if name.startswith(".")]
