"""`jaxrag serve --replicas` on a Ray cluster of this machine: real processes, over HTTP."""

import concurrent.futures
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import httpx
import pytest
from serving import key_file, until

from jaxrag.library.documents import read_paths
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.models.model import load_model

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="ray is not installed; pip install 'jaxrag[ray]' brings it",
    ),
]

ROOT = Path(__file__).parents[2]
LONG = 120.0
QUESTION = "Which animal does Kora Felell keep?"
EOS = json.loads((ROOT / "checkpoints/synthetic-0.8m/dual/config.json").read_text())["eos_token_id"]
NAMES = ["Kora Felell", "Dovia Bavin", "Bada Fivin", "Liva Bimer", "Rino Dirow"]
QUESTIONS = [f"Which animal does {name} keep?" for name in NAMES]


def environment():
    """Of a process that is to find the project, and programs that are compiled already."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
    return {**os.environ, **token, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


@contextlib.contextmanager
def process(*options, port=0):
    """`jaxrag serve` with these options, and a client of it."""
    command = [sys.executable, "-m", "jaxrag", "serve", "--port", str(port), "--name", "synthetic",
               "--k", "3", "--max-new-tokens", "8", "--no-warm-up", *options]  # fmt: skip
    with tempfile.TemporaryFile("w+") as log:
        started = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT, env=environment()
        )
        try:
            banner = started.stdout.readline()
            assert banner, log.seek(0) or log.read()
            url = next(word for word in banner.split() if word.startswith("http://"))
            with httpx.Client(base_url=url, timeout=LONG) as client:
                yield started, client
        finally:
            started.send_signal(signal.SIGTERM)
            try:
                started.wait(30)
            finally:
                started.kill()
                started.wait()
                started.stdout.close()


def replicas(client):
    """What the server says of its replicas, by name."""
    return client.get("/v1/engine").json()["replicas"]


def ask(client, question=QUESTION, **more):
    """A chat."""
    messages = [{"role": "user", "content": question}]
    return client.post("/v1/chat/completions", json={"messages": messages, **more})


def said(client, question=QUESTION, **more):
    """What it answers."""
    answer = ask(client, question, **more)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def streamed(client, question, first=lambda: None, **more):
    """The texts of a stream, and its error, if any. ``first`` is called at its first."""
    body = {"messages": [{"role": "user", "content": question}], "stream": True, **more}
    texts, error = [], None
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            return texts, json.loads(answer.read())["error"]
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            error = event.get("error", error)
            found = [it["delta"].get("content") or "" for it in event.get("choices", [])]
            if any(found) and not any(texts):
                first()
            texts += found
    return texts, error


def right_or_told(answer, right):
    """Is an answer the right one? False where it is the error of a replica that died with it.

    Raises AssertionError for anything else.
    """
    if answer.status_code == 503:
        error = answer.json()["error"]
        assert error["code"] == "engine_unavailable" and "\n" not in error["message"]
        assert float(answer.headers["retry-after"]) > 0
        return False
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == right
    return True


def goes_on(client):
    """What becomes of the first turn of a conversation, for which it went to an engine before."""
    files = ["File 18: Giso Berow lives in Tondorf.", "File 23: Mela Forow works as a judge."]
    asked = [{"role": "user", "content": "What is the home of Giso Berow?"}]

    def answer():
        body = {"messages": asked, "documents": files}
        found = client.post("/v1/chat/completions", json=body)
        assert found.status_code == 200, found.text
        return found.json()

    content = answer()["choices"][0]["message"]["content"]
    asked.append({"role": "assistant", "content": content})
    asked.append({"role": "user", "content": "What is the job of Mela Forow?"})
    return [it["how"] for it in answer()["jaxrag"]["reuse"] if it["part"] == "turn 0"]


def test_two_replicas(village):
    """They answer as one engine does, and one that is killed fails its stream alone."""
    with process("--kb", f"village={village}", "--replicas", "2", "--ray-address", "local") as (
        _,
        client,
    ):
        assert said(client) == "falcon"
        assert client.get("/health").status_code == client.get("/ready").status_code == 200
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            expected = list(threads.map(lambda it: said(client, it), QUESTIONS))
            assert list(threads.map(lambda it: said(client, it), QUESTIONS * 4)) == expected * 4
            assert goes_on(client) == ["prefix hit"]
            # A long stream whose replica is killed, beside short ones of both.
            long = {"max_tokens": 250, "logit_bias": {str(EOS): -100}}
            texts, error = streamed(client, QUESTION, **long)
            assert error is None
            whole, others, killed = "".join(texts), [], []

            def kill():
                [busy] = [it for it in replicas(client).values() if it["running"]]
                others.extend(threads.submit(ask, client, it) for it in QUESTIONS * 2)
                killed.append(busy["pid"])
                os.kill(busy["pid"], signal.SIGKILL)

            texts, error = streamed(client, QUESTION, kill, **long)
            answered = [it.result() for it in others]
            right = [right_or_told(*it) for it in zip(answered, expected * 2, strict=True)]
            assert sum(right) >= len(right) - 1  # one may have had its first token
        assert error["code"] == "engine_unavailable", error
        assert "while it answered; ask again" in error["message"] and "\n" not in error["message"]
        assert whole.startswith("".join(texts)) and "".join(texts) != whole
        again, error = streamed(client, QUESTION, **long)  # by the other
        assert error is None and "".join(again) == whole
        until(lambda: all(it["up"] for it in replicas(client).values()))  # Ray Serve made another
        assert killed[0] not in {it["pid"] for it in replicas(client).values()}
        metrics = client.get("/metrics").text
        assert 'jaxrag_replicas{state="up"} 2.0' in metrics


@contextlib.contextmanager
def cluster(cpus=4):
    """A Ray cluster that outlives its servers; yields its address."""
    program = (
        f"import json, ray; it = ray.init(address='local', num_cpus={cpus}, "
        "include_dashboard=False, "
        "log_to_driver=False); print(json.dumps(it.address_info['address']), flush=True); input()"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        yield json.loads(started.stdout.readline())
    finally:
        started.communicate("\n")


@pytest.mark.slow
def test_a_server_that_is_killed_finds_its_replicas_again(village):
    """They keep what they hold; other settings under the same name are refused in one line."""
    with cluster() as address:
        options = ["--kb", f"village={village}", "--replicas", "2", "--ray-address", address]
        with process(*options) as (server, client):
            assert said(client) == "falcon"
            before = {name: it["pid"] for name, it in replicas(client).items()}
            server.kill()
            server.wait()
        with process(*options) as (_, client):
            assert {name: it["pid"] for name, it in replicas(client).items()} == before
            answer = ask(client).json()
            assert answer["choices"][0]["message"]["content"] == "falcon"
            assert {row["where"] for row in answer["jaxrag"]["reuse"]} == {"pool"}
        refused = run(*options, "--name", "synthetic", "--rows", "3")
        assert refused.returncode == 1
        line = refusal(refused)
        assert "engines of synthetic with other settings run in this Ray cluster" in line
        # Another cluster's server, or another name, with other weights over the same repository.
        other = ["--model", str(ROOT / "checkpoints/synthetic-0.8m/full"), "--name", "other"]
        refused = run(*options, *other)
        assert refused.returncode == 1
        assert "village belongs to model" in refusal(refused)
        with process(*options) as (_, client):  # the first go on
            assert {name: it["pid"] for name, it in replicas(client).items()} == before
            assert said(client) == "falcon"


@pytest.mark.slow
@pytest.mark.parametrize("cpus", [4, 2])
def test_weights_change_and_no_request_fails(village, tmp_path, cpus):
    """A second server takes over from the first: its engines start, and those of the first end.

    With room for all of them beside each other, and with room for two only.
    """
    other, model = tmp_path / "village", load_model(ROOT / "checkpoints/synthetic-0.8m/full")
    settings = {"chunk_by": "sentence", "chunk_tokens": 20, "overlap": 0}
    with KnowledgeBase.open(other, model=model, encoders=["isolated"], **settings) as kb:
        kb.add(read_paths([str(ROOT / "examples/village")]))
    over, answers = threading.Event(), []

    def asks(url):
        while not over.is_set():
            with httpx.Client(base_url=url, timeout=LONG) as client:
                answers.append(ask(client).status_code)

    with cluster(cpus) as address, concurrent.futures.ThreadPoolExecutor(2) as threads:
        more = ["--replicas", "2", "--ray-address", address, "--method", "turborag"]
        with process("--kb", f"village={village}", *more) as (old, client):
            asking = [threads.submit(asks, str(client.base_url)) for _ in range(2)]
            before = {it["pid"] for it in replicas(client).values()}
            options = ["--kb", f"village={other}", *more, "--take-over"]
            with process(*options, port=client.base_url.port) as (_, new):
                assert new.base_url == client.base_url
                assert old.wait(300) == 0
                until(lambda: not any(map(is_there, before)))
                count = len(answers)
                until(lambda: len(answers) > count + 4)
                until(lambda: all(it["up"] for it in replicas(new).values()))
                after = {it["pid"] for it in replicas(new).values()}
                over.set()
                for it in asking:
                    it.result()
                assert len(after) == 2 and all(map(is_there, after))
    assert set(answers) == {200}


def is_there(pid):
    """Does a process run?"""
    return os.path.exists(f"/proc/{pid}")


@pytest.mark.slow
def test_a_replica_of_two_processes_is_one(village):
    """One model over both; where one of them dies both start anew."""
    options = ["--kb", f"village={village}", "--replicas", "1", "--replica-processes", "2",
               "--ray-address", "local", "--method", "turborag"]  # fmt: skip
    with process(*options) as (_, client):
        assert said(client) == "falcon"
        assert [said(client, it) for it in QUESTIONS] == [said(client, it) for it in QUESTIONS]
        refused = ask(client, documents=["Zed Ibsen keeps a falcon."])
        assert refused.status_code == 400, refused.text
        assert "this request reads a store that only one process has" in refused.text
        [before] = [it["pid"] for it in replicas(client).values()]
        long = {"max_tokens": 250, "logit_bias": {str(EOS): -100}}
        _, error = streamed(client, QUESTION, lambda: os.kill(*follower(), signal.SIGKILL), **long)
        assert error["code"] == "engine_unavailable" and "\n" not in error["message"]
        until(lambda: before not in {it["pid"] for it in replicas(client).values() if it["up"]})
        until(lambda: all(it["up"] for it in replicas(client).values()))
        assert said(client) == "falcon"


def follower():
    """The process of the replica's that follows."""
    named = [path for path in Path("/proc").glob("[0-9]*/cmdline")
             if path.exists() and path.read_bytes().startswith(b"ray::RayRank")]  # fmt: skip
    return [int(path.parent.name) for path in named]


def run(*options):
    """`jaxrag serve` that is to end by itself."""
    return subprocess.run(
        [sys.executable, "-m", "jaxrag", "serve", "--port", "0", *options],
        capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=LONG,
    )  # fmt: skip


def refusal(done):
    """The one line in which a command says why it ended."""
    [line] = [it for it in done.stderr.splitlines() if it.startswith("jaxrag: error:")]
    return line


@pytest.mark.slow
def test_replicas_have_the_whole_surface_of_one_engine(chat_model_dir, tmp_path):
    """Uploads, forms, documents, scores and tenants, where engines are other processes."""
    keys = dict.fromkeys(("ann", "bob"), 'read = ["*"]\nadmin = true')
    keys = key_file(tmp_path / "keys.toml", keys)
    options = ["--model", str(chat_model_dir), "--replicas", "2", "--ray-address", "local",
               "--keys", keys, "--data", str(tmp_path / "data"), "--method", "turborag",
               "--routing", "round_robin"]  # fmt: skip
    with process(*options) as (_, client):
        assert ask(client).status_code == 401
        client.headers["authorization"] = "Bearer ann"
        assert said(client) == said(client)  # by the one and by the other
        # A form, whose grammar each engine makes for itself.
        choices = ["duck", "falcon"]
        assert {said(client, guided_choice=choices) for _ in range(2)} <= set(choices)
        # An upload: encoded by the server, read by both engines.
        files = {"file": ("zed.txt", b"Zed Ibsen keeps a falcon. He lives in Aldorf.")}
        made = client.post("/v1/files", files=files, data={"purpose": "assistants"})
        assert made.status_code == 200, made.text
        store = client.post("/v1/vector_stores", json={"file_ids": [made.json()["id"]]}).json()[
            "id"
        ]
        path = f"/v1/vector_stores/{store}"
        until(lambda: client.get(path).json()["status"] == "completed")
        question = "Which animal does Zed Ibsen keep?"
        found = [ask(client, question, knowledge_base=store).json() for _ in range(2)]
        rows = [row for it in found for row in it["jaxrag"]["reuse"] if row["part"] != "prefix"]
        assert [row["where"] for row in rows] == ["store", "store"], rows
        client.headers["authorization"] = "Bearer bob"
        assert ask(client, question, knowledge_base=store).status_code == 404
        # Documents that come along are each engine's own, and forgotten by all.
        sent = {"documents": ["Zed Ibsen keeps a falcon."]}
        hows = [
            ask(client, question, **sent).json()["jaxrag"]["reuse"][-1]["how"] for _ in range(4)
        ]
        assert hows == ["encoded", "encoded", "chunk hit", "chunk hit"]
        assert client.delete("/v1/plain").json()["passages"] >= 2
        assert ask(client, question, **sent).json()["jaxrag"]["reuse"][-1]["how"] == "encoded"
        # Scores of texts, which the server computes itself.
        body = {"prompt": "File 18: Kora", "max_tokens": 0, "echo": True, "logprobs": 1}
        scored = client.post("/v1/completions", json=body)
        assert scored.status_code == 200, scored.text
        assert "jaxrag_engine_requests" in client.get("/metrics").text
