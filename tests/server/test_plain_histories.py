"""Law 16: an answer is a function of the request, whatever was asked, kept, lost or read before."""

import itertools
import json
import random
from pathlib import Path

import pytest
from serving import key_file

from jaxrag.base.errors import StoreError
from jaxrag.kv.store import Provenance
from jaxrag.models.model import load_model
from jaxrag.server.state.memory import PLAIN

ROOT = Path(__file__).parents[2]
WORDS = ["Otters", "bees", "fish", "fields", "sleep", "fly", "eat", "at", "day", "high", "over"]
KINDS = ("cold", "warm", "reversed", "evicted", "restarted", "from disk")


@pytest.fixture
def serve(start, trained_dir, rules_file, tmp_path):
    """``serve()``: a server as a new process is, over one data folder."""

    def call(**settings):
        given = {"data": str(tmp_path / "data"), "plain_store_bytes": 1 << 30} | settings
        model = load_model(trained_dir, cache_tokens=8192)
        plain = {"plain": "passages", "passage_rules": rules_file, "warm_up": False}
        return start(model, {}, **plain, **given)

    return call


def passage(draw):
    return " ".join(draw.choices(WORDS, k=draw.randint(24, 60))) + "."


def request_of(seed):
    """A chat with pasted passages, and the same with their order reversed."""
    draw = random.Random(seed)
    passages = [passage(draw) for _ in range(draw.randint(2, 4))]
    turns = [] if draw.random() < 0.5 else [("user", "Who flies?"), ("assistant", "Bees fly.")]

    def body(order):
        pasted = "\n".join(f"<source>{it}</source>" for it in order)
        said = [*turns, ("user", f"{pasted}\n\nWho {draw.choice(['sleeps', 'eats'])}?")]
        return {
            "messages": [{"role": role, "content": text} for role, text in said],
            "max_tokens": 6,
            "logprobs": True,
        }

    state = draw.getstate()
    first = body(passages)
    draw.setstate(state)
    return first, body(passages[::-1])


def ask(serving, body):
    return serving.post("/v1/chat/completions", **body).raise_for_status().json()


def said(answer):
    """Tokens and log-probabilities, to the bit."""
    assert answer["jaxrag"]["plain"], "nothing was read as a block"
    return json.dumps(answer["choices"])


def seen_how(answer):
    return {it["how"] for it in answer["jaxrag"]["plain"]}


def run_histories(serve, seeds):
    """Answers of every request, by history."""
    requests = [request_of(seed) for seed in seeds]
    told = {kind: [] for kind in KINDS}
    with serve() as serving:
        for body, other in requests:
            told["cold"].append(said(ask(serving, body)))
            told["warm"].append(said(ask(serving, body)))
            ask(serving, other)
            told["reversed"].append(said(ask(serving, body)))
        serving.state.engine.forget()  # the pool and the arena
        for body, _ in requests:
            told["evicted"].append(said(ask(serving, body)))
    with serve(plain_store_bytes=0) as serving:
        for body, _ in requests:
            told["restarted"].append(said(ask(serving, body)))
    with serve() as serving:
        for body, _ in requests:
            answer = ask(serving, body)
            assert "first sight" not in seen_how(answer), answer["jaxrag"]["plain"]
            told["from disk"].append(said(answer))
    return told


def test_answers_are_equal_after_every_history(serve):
    told = run_histories(serve, range(3))
    for kind, cold in itertools.product(KINDS[1:], [told["cold"]]):
        assert told[kind] == cold, kind


@pytest.mark.slow  # 500 requests, six histories each: ten minutes
def test_500_answers_are_equal_after_every_history(serve):
    told = run_histories(serve, range(500))
    for kind in KINDS[1:]:
        assert told[kind] == told["cold"], kind


def test_a_tenant_forgets_all_that_is_kept(serve, tmp_path):
    body, _ = request_of(1)
    folder = tmp_path / "data" / PLAIN
    with serve() as serving:
        first = ask(serving, body)
        ask(serving, body)
        assert any(it.is_file() for it in folder.rglob("c/**/*"))
        blocks = len(first["jaxrag"]["plain"])
        gone = serving.client.delete("/v1/plain").raise_for_status().json()
        assert gone == {"object": "plain", "deleted": True, "passages": blocks}
        assert not any(it.is_file() for it in folder.rglob("c/**/*"))
        assert serving.state.token_cache.nbytes == 0
        again = ask(serving, body)
        assert seen_how(again) == {"first sight"}
        assert said(again) == said(first)
        assert serving.client.delete("/v1/plain").json()["passages"] == blocks
    with serve() as serving:
        assert seen_how(ask(serving, body)) == {"first sight"}


def test_what_comes_after_a_tenant_has_forgotten_is_not_kept(serve, tmp_path):
    """As of a request that is answered meanwhile."""
    body, _ = request_of(1)
    with serve() as serving:
        ask(serving, body)
        store = serving.state.memory.store("")
        record = next(store.records())
        made = Provenance(record.encoder, record.content_id, record.context_id)
        kv = store.get(record.key)
        serving.client.delete("/v1/plain").raise_for_status()
        with pytest.raises(StoreError, match="has all forgotten"):
            store.put(record.key, kv, record=made, replace=True)
        assert not any(it.is_file() for it in (tmp_path / "data" / PLAIN).rglob("c/**/*"))


def test_passages_on_disk_have_a_bound(serve, tmp_path):
    """Each by itself fits, all together do not; the answers are those of the first time."""
    requests = [request_of(seed)[0] for seed in range(4)]
    with serve() as serving:
        told = [said(ask(serving, body)) for body in requests]
        most = max(it.nbytes for it in serving.state.memory.store("").records())
        serving.client.delete("/v1/plain").raise_for_status()
    bound = 3 * most
    with serve(plain_store_bytes=bound) as serving:
        for body, wanted in zip(requests * 2, told * 2, strict=True):
            assert said(ask(serving, body)) == wanted
            serving.state.engine.forget()
            held = sum(it.nbytes for it in serving.state.memory.store("").records())
            assert 0 < held <= bound


def run_tenants(serve, tmp_path, count):
    """What a tenant is told of texts that another had asked about twice, and the other's own."""
    names = ("acme", "blue")
    keys = key_file(tmp_path / "keys.toml", dict.fromkeys(names, ""))
    draw, told, texts = random.Random(8), {it: [] for it in names}, 0
    with serve(keys=keys) as serving:
        while texts < count:
            body, other = request_of(draw.getrandbits(40))
            for name, bodies in (("acme", (body, other, body)), ("blue", (body,))):
                serving.client.headers["authorization"] = f"Bearer {name}"
                answers = [ask(serving, it) for it in bodies]
                told[name].append((answers[0], answers[-1]))
            texts += len(answers[0]["jaxrag"]["plain"])
    return told


def check_tenants(told):
    """No hit, the same work counted and the same answer as who came first."""
    for (first, again), (other, _) in zip(told["acme"], told["blue"], strict=True):
        assert seen_how(first) == seen_how(other) == {"first sight"}
        assert "first sight" not in seen_how(again)
        assert other["usage"] == first["usage"]
        assert other["jaxrag"]["plain"] == first["jaxrag"]["plain"]
        assert said(other) == said(first)


def test_a_tenant_finds_nothing_of_another(serve, tmp_path):
    check_tenants(run_tenants(serve, tmp_path, 6))


@pytest.mark.slow  # 1,000 texts
def test_a_tenant_finds_none_of_1000_texts_of_another(serve, tmp_path):
    check_tenants(run_tenants(serve, tmp_path, 1000))
