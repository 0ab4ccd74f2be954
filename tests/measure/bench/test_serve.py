"""Serving under load: what is drawn, what is said of it, and tiny runs; no time is judged."""

import dataclasses
import json
import math
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import jax
import numpy as np
import pytest
import tokenizers
from refusal import refused

from jaxrag.base.errors import RequestError
from jaxrag.cli import main
from jaxrag.kv.store import MemoryStore, Provenance, chunk_key, content_id, context_id
from jaxrag.measure.bench.options import ServeOptions, Slo, Traffic, link_of, rates_of
from jaxrag.measure.bench.serve import run
from jaxrag.measure.bench.serve_arms import arms_of
from jaxrag.measure.bench.serve_client import offer_http
from jaxrag.measure.bench.serve_peer import HttpPeer, vllm, write_model
from jaxrag.measure.bench.serve_records import ServedRequest, summary
from jaxrag.measure.bench.serve_report import report
from jaxrag.measure.bench.serve_workload import documents, draw, like
from jaxrag.measure.bench.throttle import SlowLink, Throttled
from jaxrag.models.export import export_hf
from jaxrag.models.model import load_model, random_model
from jaxrag.models.spec import init_params

TINY = Traffic(
    requests=6, documents=6, chunk_tokens=20, chunks=2, question=5, answers=(3, 5), topics=2,
    neighbours=1,
)  # fmt: skip


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch):
    monkeypatch.setattr("jaxrag.measure.machine.SETTLE_SECONDS", 0)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, tiny_config):
    config = tiny_config(eos_ids=())
    path = tmp_path_factory.mktemp("serve") / "model"
    export_hf(path, init_params(config, jax.random.key(0)), config)
    return str(path)


def ids_of(asked):
    return [[*map(tuple, it.prompt.chunks), tuple(it.prompt.final)] for it in asked]


# What is drawn


def test_a_seed_says_who_asks_what_and_when():
    one, two = draw(Traffic(), 2000), draw(Traffic(), 2000)
    assert ids_of(one) == ids_of(two)
    assert [(it.due, it.tokens) for it in one] == [(it.due, it.tokens) for it in two]
    other = draw(Traffic(seed=1), 2000)
    assert ids_of(one) != ids_of(other)
    assert [it.due for it in one] != [it.due for it in other]


def test_rates_move_the_same_requests():
    asked = draw(Traffic(), 2000)
    assert [it.at(4) for it in asked] == [it.at(2) / 2 for it in asked]
    assert {it.at(math.inf) for it in asked} == {0.0}


def test_arrivals_are_a_poisson_process():
    due = np.array([it.due for it in draw(Traffic(requests=4000, documents=4), 2000)])
    gaps = np.diff(due)
    assert due[-1] == pytest.approx(4000, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # exponential
    assert np.corrcoef(gaps[:-1], gaps[1:])[0, 1] == pytest.approx(0, abs=0.05)


def test_documents_are_popular_by_zipf_and_share_topics():
    traffic = Traffic(requests=2000, documents=40, chunks=3, topics=5)
    library = {tuple(it): n for n, it in enumerate(documents(traffic, 2000))}
    asked = [[library[tuple(c)] for c in it.prompt.chunks] for it in draw(traffic, 2000)]
    assert all(len(set(it)) == 3 for it in asked)
    first = Counter(it[0] for it in asked)
    share = 1 / sum(1 / n for n in range(1, 41))
    assert first[0] / 2000 == pytest.approx(share, abs=0.03)
    assert first[1] / 2000 == pytest.approx(share / 2, abs=0.03)
    alike = np.mean([it[0] % 5 == it[1] % 5 for it in asked])
    free = dataclasses.replace(traffic, focus=0.0)
    drawn = [[library[tuple(c)] for c in it.prompt.chunks] for it in draw(free, 2000)]
    assert alike > np.mean([it[0] % 5 == it[1] % 5 for it in drawn]) + 0.3


def test_neighbours_are_others_and_belong_to_the_document():
    asked = draw(Traffic(), 2000)
    seen = {}
    for it in asked:
        for chunk, others in zip(it.prompt.chunks, it.prompt.neighbours, strict=True):
            assert len(others) == 2
            assert tuple(chunk) not in map(tuple, others)
            assert seen.setdefault(tuple(chunk), [*map(tuple, others)]) == [*map(tuple, others)]


def test_warm_requests_have_every_shape_and_no_document_of_the_workload():
    warm = like(Traffic(), 2000, 2)
    assert sorted(it.tokens for it in warm) == [8, 8, 16, 16, 32, 32, 64, 64]
    seen = {tuple(c) for it in draw(Traffic(), 2000) for c in it.prompt.chunks}
    assert not seen & {tuple(c) for it in warm for c in it.prompt.chunks}
    assert {len(it.prompt.chunks) for it in warm} == {4}


# What is said of it


def record(due, first, last, tokens, wanted=None, **more):
    one = ServedRequest(due, wanted or tokens, **more)
    one.came(first, 1)
    one.came(last, tokens - 1)
    one.done = True
    return one


SLO = Slo(first=1.0, per_token=0.1)


def test_times_count_from_when_a_request_was_due():
    one = record(2.0, 2.5, 3.5, 11)
    assert (one.to_first, one.to_last) == (0.5, 1.5)
    assert one.per_token == pytest.approx(0.1)
    assert record(0, 1, 1, 1).per_token == 0


@pytest.mark.parametrize(
    ("served", "good"),
    [
        (record(0, 0.5, 1.4, 11), True),
        (record(0, 1.0, 1.5, 11), False),  # the first token is late
        (record(0, 0.5, 1.6, 11), False),  # the others are
        (record(0, 0.5, 1.0, 11, wanted=12), False),  # one is missing
        (ServedRequest(0, 3), False),
    ],
)
def test_what_is_good(served, good):
    assert served.good(SLO) is good


def test_summary_of_hand_made_records():
    served = [record(0, 0.1, 0.3, 3), record(1, 1.2, 5.2, 5)]
    lost = ServedRequest(2, 3, error="gone")
    lost.came(2.5, 1)
    found = summary([*served, lost], SLO)
    assert (found["requests"], found["lost"], found["errors"]) == (3, 1, ["gone"])
    assert found["first_token"]["p50"] == pytest.approx(0.15)
    assert found["per_token"]["p95"] == pytest.approx(0.1 + 0.95 * 0.9)
    assert found["end_to_end"]["p99"] == pytest.approx(0.3 + 0.99 * 3.9)
    assert found["good"] == pytest.approx(1 / 3)
    assert found["seconds"] == pytest.approx(5.2)
    assert found["tokens_per_second"] == pytest.approx(9 / 5.2)
    assert found["good_per_second"] == pytest.approx(1 / 5.2)
    assert found["first_tokens"] == [0.1, 0.2, 0.5]


# The link


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self):
        self.now, self.slept = 100.0, []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


def test_a_link_sends_one_after_the_other():
    clock = Clock()
    link = SlowLink(10.0, clock, clock.sleep)
    first, second = link.book(20), link.book(10)
    assert (first, second, link.carried) == (102.0, 103.0, 30)
    link.wait(first)
    link.wait(second)
    assert clock.slept == [2.0, 1.0]
    clock.now = 200.0  # it idled
    assert link.book(10) == 201.0
    clock.now = 205.0  # the read itself took longer
    link.wait(201.0)
    assert clock.slept == [2.0, 1.0]
    with refused(RequestError, "0"):
        SlowLink(0)


def test_a_throttled_store_is_the_store_and_sleeps_by_bytes(tiny_config):
    model = random_model(tiny_config())
    inner = MemoryStore(model.fingerprint, model.kv_layout)
    ids = np.arange(5, dtype=np.int32)
    record = Provenance("isolated", content_id("", ids), context_id("isolated", ids[:0]))
    key = chunk_key(model.fingerprint, record.content_id, record.context_id)
    clock = Clock()
    layout = model.kv_layout
    store = Throttled(inner, SlowLink(layout.nbytes(5) / 4, clock, clock.sleep))
    kv = np.ones(layout.shape(5), layout.numpy_dtype)
    store.put(key, kv, record=record)
    assert clock.slept == []
    assert np.array_equal(store.get(key), kv)
    assert clock.slept == [4.0]  # the chunk in four seconds
    store.get(key, layers=(0, 1))
    assert clock.slept[1] == pytest.approx(4.0 / layout.num_layers)
    assert list(store.keys()) == [key] and store.find([key]) == inner.find([key])
    assert store.delete([key]) == 1 and not list(inner.keys())


# Arms


def test_arms_are_settings():
    static, inline, beside, full = arms_of(
        "static;inline;asynchronous:engine.load_threads=7;full:engine.prefill_tokens=64"
    )
    assert static.engine.scheduler.static and static.engine.lockstep
    assert inline.engine.lockstep and not inline.engine.scheduler.static
    assert (beside.engine.load_threads, beside.engine.lockstep) == (7, False)
    assert (full.method, full.engine.prefill_tokens) == ("full_attention", 64)
    assert full.name == "full:engine.prefill_tokens=64"
    [some] = arms_of("asynchronous:method=cacheblend,recompute_ratio=0.3")
    assert some.resolved.recompute_ratio == 0.3


# Whole runs


def tiny(model_dir, **changes):
    options = ServeOptions(model=model_dir, traffic=TINY, rates=(50.0,), rows=2, pool_chunks=10)
    return dataclasses.replace(options, **changes)


def test_all_arms_give_the_same_tokens_and_lose_nothing(model_dir):
    result = run(tiny(model_dir, rates=(30.0, math.inf), link=1e7))
    rows = result["rows"]
    arms = ["static", "inline", "asynchronous", "full"]
    assert [(row["arm"], row["rate"]) for row in rows] == [
        (arm, rate) for rate in (30.0, None) for arm in arms
    ]
    for row in rows:
        assert (row["requests"], row["lost"], row["errors"]) == (6, 0, [])
        assert row["compiled"] == [], row["arm"]
        assert sum(row["found"].values()) == 12
        assert len(row["first_tokens"]) == 6
        for times in (row["first_token"], row["per_token"], row["end_to_end"]):
            assert 0 < times["p50"] <= times["p95"] <= times["p99"]
        if row["arm"] == "full":
            assert row["found"] == {"computed": 12} and row["read_bytes"] == 0
        else:
            assert set(row["found"]) <= {"pool", "store"}
            read = row["found"]["store"] * result["model"]["chunk_bytes"]
            assert row["read_bytes"] == read > 0
    assert result["equal"] == {"arms": 1.0, "peer_as_full": None}
    lines = "\n".join(report(result))
    assert "asynchronous" in lines and "30/s" in lines and "store of 10 MB/s" in lines
    json.dumps(result, allow_nan=False)


def test_arms_that_recompute_find_their_chunks_stored(model_dir):
    """Under both of FusionRAG's encoders, with the same tokens whoever reads them."""
    result = run(tiny(model_dir, arms="fusionrag;fusionrag_inline"))
    for row in result["rows"]:
        assert (row["lost"], row["compiled"]) == (0, [])
        assert set(row["found"]) <= {"pool", "host", "store"} and row["found"]["store"]
    assert result["equal"]["arms"] == 1.0


def test_requests_that_come_too_late_are_lost(model_dir):
    """A store that takes a third of a second a chunk, for a client that waits a twentieth."""
    both = "asynchronous;asynchronous:link=0"
    row, free = run(tiny(model_dir, arms=both, link=3e4, patience=0.05))["rows"]
    assert free["read_bytes"] is None  # behind no link at all
    assert (row["lost"], row["good"], row["first_token"]) == (6, 0.0, None)


def test_the_program_writes_what_it_measured(model_dir, tmp_path, capsys):
    out = str(tmp_path / "r.json")
    sizes = "--requests 4 --num-documents 6 --chunk-tokens 20 --chunks 2 --question-tokens 5"
    sizes = f"{sizes} --answer-lengths 3 --rows 2 --pool-chunks 10".split()
    given = ["--arms", "inline;asynchronous", "--rates", "40", "--link", "10MB/s", "--topics", "2"]
    assert main(["bench", "serve", "--model", model_dir, *sizes, *given, "--out", out]) == 0
    shown = capsys.readouterr().out
    with open(out, encoding="utf-8") as file:
        result = json.load(file)
    assert shown.splitlines() == list(report(result))
    assert result["link_bytes_per_second"] == 1e7
    assert result["traffic"]["answers"] == [3]


def test_rates_and_links_are_read():
    assert rates_of("2,inf") == (2.0, math.inf)
    assert link_of("40MB/s") == 40e6
    for read, texts in ((rates_of, ", two, 0, nan"), (link_of, "40MB, 40, MB/s, 40MB/h, 0MB/s")):
        for text in texts.split(", "):
            with refused(ValueError):
                read(text)


# A peer


class Completions(BaseHTTPRequestHandler):
    """A server of OpenAI's completions: each token is the prompt's length plus its number."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        answers = {
            "/v1/models": {"data": [{"id": "tiny"}]}, "/version": {"version": "1.2"},
        }  # fmt: skip
        body = json.dumps(answers.get(self.path, {})).encode()
        self.send_response(200 if self.path in answers else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        how = self.server.how
        if how == "refuse":
            body = b'{"error": {"message": "too\\nlong"}}'
            self.send_response(400)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        start = len(asked["prompt"])
        events = []
        for n in range(asked["max_tokens"]):
            last = n + 1 == asked["max_tokens"]
            choice = {"text": f"t{n} ", "finish_reason": "length" if last else None}
            if how == "ids":
                choice["token_ids"] = [start + n]
            events.append({"choices": [choice]})
        if how == "stop":
            events = events[:1]
        if how == "error":
            events[1:] = [{"error": "broken"}]
        if how != "stop":
            events.append({"choices": [], "usage": {"completion_tokens": asked["max_tokens"]}})
        text = "".join(f"data: {json.dumps(it)}\r\n\r\n" for it in events) + ": a comment\n\n"
        data = (text + "data: [DONE]\n\n").encode()
        for at in range(0, len(data), 7):  # chunks that end anywhere
            part = data[at : at + 7]
            self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
        self.wfile.write(b"0\r\n\r\n")


@pytest.fixture
def server():
    served = ThreadingHTTPServer(("127.0.0.1", 0), Completions)
    served.asked, served.how = [], "ids"
    thread = threading.Thread(target=served.serve_forever, daemon=True)
    thread.start()
    served.url = f"http://127.0.0.1:{served.server_port}"
    yield served
    served.shutdown()
    served.server_close()
    thread.join()


def test_the_client_reads_a_stream_of_events(server):
    peer = HttpPeer(server.url + "/", {"name": "tiny"})
    assert (peer.model, peer.about) == ("tiny", {"name": "tiny", "version": "1.2"})
    asked = draw(TINY, 101)
    served = offer_http(server.url, asked, 100.0, lambda it: peer.body(it, "salt"), 10.0)
    assert all(it.complete for it in served), [it.error for it in served]
    start = 2 * 20 + 5
    assert [it.ids for it in served] == [[start + n for n in range(it.tokens)] for it in asked]
    assert all(it.due <= it.first <= it.last for it in served)
    whole = {tuple(np.concatenate((*it.prompt.chunks, it.prompt.final))) for it in asked}
    assert {tuple(it["prompt"]) for it in server.asked} == whole
    for body in server.asked:
        assert body["ignore_eos"] and body["stream"] and body["cache_salt"] == "salt"
        assert body["min_tokens"] == body["max_tokens"]


@pytest.mark.parametrize(
    ("how", "complete", "error"),
    [
        ("text", True, None),  # no ids: its usage says how many
        ("stop", False, None),  # ends before the answer does
        ("error", False, 'the peer says "broken"'),
        ("refuse", False, 'the peer answered 400: {"error": {"message": "too'),
    ],
)
def test_what_a_peer_may_do(server, how, complete, error):
    server.how = how
    peer = HttpPeer(server.url, {})
    [served] = offer_http(server.url, draw(TINY, 101)[:1], 1e3, lambda it: peer.body(it, "s"), 10.0)
    assert served.complete is complete
    assert (served.error is None) == (error is None)
    assert error is None or error in served.error


def test_a_peer_that_is_not_there():
    with refused(RequestError, "/v1/models"):
        HttpPeer("http://127.0.0.1:9", {})
    with refused(RequestError):
        HttpPeer("127.0.0.1:9", {})
    [served] = offer_http("http://127.0.0.1:9", draw(TINY, 101)[:1], 1e3, lambda it: {}, 5.0)
    assert served.error.startswith("ConnectionRefusedError")


def test_a_peer_is_measured_fresh_and_repeated(server, model_dir):
    result = run(tiny(model_dir, arms="full", peer=server.url))
    assert [row["arm"] for row in result["rows"]] == ["full", "peer", "peer_repeated"]
    fresh, repeated = result["rows"][1:]
    assert (fresh["lost"], repeated["lost"], fresh["compiled"]) == (0, 0, None)
    salts = [it["cache_salt"] for it in server.asked]
    warm, timed = salts[:-12], salts[-12:]
    assert len(set(timed)) == 1 and not set(warm) & set(timed)
    prompts = [tuple(it["prompt"]) for it in server.asked[-12:]]
    assert sorted(prompts[:6]) == sorted(prompts[6:])
    assert result["equal"] == {"arms": None, "peer_as_full": 0.0}
    assert result["peer"]["version"] == "1.2"
    assert any(it.startswith("peer: name given") for it in report(result))


def test_the_copy_of_the_model_has_the_same_weights_and_a_word_a_token(model_dir, tmp_path):
    model = load_model(model_dir)
    write_model(model, tmp_path / "copy")
    again = load_model(str(tmp_path / "copy"))
    assert again.digest == model.digest
    assert again.tokenizer is not None
    words = tokenizers.Tokenizer.from_file(str(tmp_path / "copy" / "tokenizer.json"))
    assert words.get_vocab_size() == model.config.vocab_size
    assert words.decode([3, 7], skip_special_tokens=False) == "t3 t7"


def test_a_peer_that_cannot_start_says_so(model_dir, tmp_path):
    model = load_model(model_dir)
    for python, named in (("nowhere/python", "nowhere/python"), ("false", "1")):
        folder = tmp_path / python
        folder.mkdir(parents=True)
        with refused(RequestError, named), vllm(python, model, folder, 100):
            pass
