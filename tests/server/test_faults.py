"""What a server owes when something fails: who is told what, who is not touched, what is left."""

import concurrent.futures
import contextlib
import resource
import shutil
import threading

import httpx
import numpy as np
import pytest
from serving import until

from jaxrag.base.errors import StoreError
from jaxrag.engine import transfers

CHAT = "/v1/chat/completions"
QUESTION = "Which animal does Kora Felell keep?"
BODY = {"messages": [{"role": "user", "content": QUESTION}], "k": 3}
FILES = ["File 18: Giso Berow lives in Tondorf.", "File 23: Mela Forow works as a judge."]


def text_of(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def test_a_nan_in_one_row_fails_that_row_alone(server, idle, monkeypatch):
    poison = "File 18: Kora Felell keeps a falcon."
    [falcon] = server.state.model.tokenizer.encode("falcon")
    encode = transfers.encode

    def poisoned(loads, **how):
        made = encode(loads, **how)
        for load, it in zip(loads, made, strict=True):
            if falcon in load.chunk.ids:
                it.chunk.kv[:, 1, 3] = np.nan
        return made

    monkeypatch.setattr(transfers, "encode", poisoned)
    question = [{"role": "user", "content": "What is the home of Giso Berow?"}]
    good = {"messages": question, "documents": FILES}
    bad = {"messages": question, "documents": [poison]}
    expected = text_of(server.post(CHAT, **good))
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(server.post, CHAT, **it) for it in (good, bad, good)]
        first, failed, last = (it.result() for it in asked)
    assert text_of(first) == text_of(last) == expected == "Tondorf"
    assert failed.status_code == 500
    assert failed.json()["error"]["code"] == "engine_error"
    assert "NaN" in failed.json()["error"]["message"]
    assert failed.headers["x-should-retry"] == "false"
    idle(server.state)


@pytest.fixture
def own(start, served_model, village):
    """A server of one's own, whose knowledge base may fail; everybody else's chunks are there."""
    with start(served_model, {"village": village}) as server:
        yield server


def test_storage_that_fails_is_503_and_others_do_not_notice(own, idle, monkeypatch):
    store = own.state.knowledge_bases["village"].store

    def fails(*args, **kwargs):
        raise StoreError("disk: cannot be read")

    beside = {"messages": [{"role": "user", "content": "What is the home of Giso Berow?"}],
              "documents": FILES}  # fmt: skip
    own.state.engine.forget()
    with monkeypatch.context() as patched:
        patched.setattr(type(store), "get_many", fails)
        answer = own.post(CHAT, **BODY)
        assert answer.status_code == 503 and "retry-after" in answer.headers
        assert "cannot be read" in answer.json()["error"]["message"]
        assert text_of(own.post(CHAT, **beside)) == "Tondorf"
    assert text_of(own.post(CHAT, **BODY)) == "falcon"
    failed = 'jaxrag_loads_total{link="village",result="failed"} '
    assert float(own.client.get("/metrics").text.split(failed)[1].split()[0]) >= 1
    idle(own.state)


def test_storage_that_hangs_is_504_in_time_and_others_do_not_notice(own, idle, monkeypatch):
    store, go = own.state.knowledge_bases["village"].store, threading.Event()
    get_many = type(store).get_many

    def hangs(*args, **kwargs):
        assert go.wait(300)
        return get_many(*args, **kwargs)

    def beside():
        """Shares no chunk with the other, not even a prefix: who shares one waits for it."""
        ids = {"prompt": [9, 8, 7], "documents": [list(range(20, 40)), list(range(50, 60))]}
        answer = own.post("/v1/completions", **ids, max_tokens=4, ignore_eos=True)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    expected = beside()
    own.state.engine.forget()
    monkeypatch.setattr(type(store), "get_many", hangs)
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            late = threads.submit(own.post, CHAT, **BODY, timeout=1.0)
            assert beside() == expected
            answer = late.result()
        assert answer.status_code == 504
        assert answer.headers["x-should-retry"] == "false"
        assert own.client.get("/health").status_code == 200  # it waits, and is not stuck
    finally:
        go.set()
    idle(own.state)


def test_a_body_without_an_end_is_413_and_is_not_kept(server):
    """No length is given; the sender may be cut off before it reads the answer."""
    refused = 'jaxrag_refused_total{reason="request_too_large"} '

    def count():
        told = server.client.get("/metrics").text
        return float(told.split(refused)[1].split()[0]) if refused in told else 0.0

    before, was = count(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pieces = (b" " * (1 << 20) for _ in range(100))
    with contextlib.suppress(httpx.WriteError, httpx.ReadError):
        answer = httpx.post(server.url + CHAT, content=pieces)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - was)
    assert grown < 3 * server.state.settings.max_body_bytes
    assert count() == before + 1
    assert text_of(server.post(CHAT, **BODY)) == "falcon"


def test_what_is_removed_and_swept_while_it_is_asked_about(
    start, served_model, village, held, idle, tmp_path
):
    """Who had found it is to ask again (law 18); nobody finds it again."""
    folder = shutil.copytree(village, tmp_path / "village")
    with start(served_model, {"village": folder}) as server:
        base = server.state.knowledge_bases["village"]
        assert text_of(server.chat()) == "falcon"
        server.state.engine.forget()  # nothing of it is left in memory
        keys = base._catalog.keys("kora-felell.md")["isolated"]
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            with held(server.state):
                asked = threads.submit(server.chat)
                until(lambda: any(it.prompt_tokens for it in list(server.state.asking)))
                gone = server.client.delete("/v1/vector_stores/village/files/kora-felell.md")
                assert gone.status_code == 200, gone.text
                swept = base.gc(grace_seconds=0).chunks
                # Both chunks, and variants of them that other tests' questions had encoded.
                assert swept >= 2 and base.store.head(keys) == [None, None]
            answer = asked.result()
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "document_removed"
        sources = server.chat().json()["jaxrag"]["sources"]
        assert sources and not any(it["document_id"] == "kora-felell.md" for it in sources)
        idle(server.state)
