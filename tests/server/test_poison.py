"""A hostile tenant changes no answer, count or refusal of another (laws 16 and 17).

The same requests of one tenant go to two servers: to one alone, and to one where another tenant
sends, before each, what could do harm if KV, names or counters were shared: the same documents with
one word changed, under the same ids, titles and file names; markers of the prompt's format as text;
streams that are left; requests that are refused.
"""

import json
import random
from pathlib import Path

import pytest
from serving import key_file

from jaxrag.models.model import load_model

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "checkpoints/synthetic-0.8m/dual"
TOKENS_A_TRY = 600  # of the pool, in whole pages
QUESTIONS = [
    json.loads(line)["question"]
    for line in (ROOT / "examples/village-questions.jsonl").read_text(encoding="utf-8").splitlines()
]
PASSAGES = tuple(
    " ".join(path.read_text(encoding="utf-8").split())
    for path in sorted((ROOT / "examples/village").glob("*.md"))
)
MARKERS = ("<|doc_start|>", "<|doc_end|>", "Question:", "Answer:", "<eos>")
TENANTS = ("honest", "hostile")


def header(name):
    return {"authorization": f"Bearer {name}"}


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    keys = dict.fromkeys(TENANTS, 'read = ["*"]')
    return key_file(tmp_path_factory.mktemp("keys") / "keys.toml", keys)


def chat(question, **body):
    return {"messages": [{"role": "user", "content": question}], "max_tokens": 4, **body}


def honest_request(rng):
    """A question over own documents, over the shared knowledge base, or one that is refused."""
    question = rng.choice(QUESTIONS)
    kind = rng.randrange(8)
    if kind == 0:
        return chat(question, knowledge_base="village", k=3)
    if kind == 1:
        return chat(question, documents=[rng.choice(PASSAGES)] * 90)  # beyond the context
    if kind == 2:
        return chat(f"{question} Swordfish?", documents=list(PASSAGES[:1]))
    if kind == 3:
        said = [{"role": "user", "content": question}, {"role": "assistant", "content": "goat"}]
        body = chat(rng.choice(QUESTIONS), documents=list(PASSAGES[:2]))
        return body | {"messages": said + body["messages"]}
    return chat(question, documents=rng.sample(PASSAGES, 3))


def spoiled(rng, text):
    """A passage with a word of another, or with markers in it."""
    words = text.split()
    if rng.random() < 0.3:
        words.insert(rng.randrange(len(words)), rng.choice(MARKERS))
    else:
        words[rng.randrange(len(words))] = rng.choice(rng.choice(PASSAGES).split())
    return " ".join(words)


def attack(rng, server, honest):
    """One hostile request, often made from the honest one that comes next."""
    client = server.client
    own = [it for it in honest.get("documents", PASSAGES) if isinstance(it, str)][:4]
    question = honest["messages"][-1]["content"]
    kind = rng.randrange(7)
    if kind == 0:  # the same documents, first
        body = chat(question, documents=own)
    elif kind == 1:  # under the same titles and ids, with other words
        documents = [{"id": "1", "title": it[:9], "text": spoiled(rng, it)} for it in own]
        body = chat(question, documents=documents)
    elif kind == 2:  # an order of the same chunks, computed again in part
        body = chat(question, documents=own[::-1], method="cacheblend", recompute_ratio=0.5)
    elif kind == 3:
        body = chat(question, blocks=[spoiled(rng, PASSAGES[0])], documents=own)
    elif kind == 4:
        body = chat(question, documents=own, temperature=1.5, seed=rng.randrange(9), logprobs=True)
    elif kind == 5:
        body = chat(question, documents=own, stream=True)
        with client.stream("POST", "/v1/chat/completions", json=body, headers=header("hostile")):
            return  # and leaves
    else:
        file = ("giso-berow.md", spoiled(rng, rng.choice(PASSAGES)).encode())
        form = {"purpose": "assistants"}
        client.post("/v1/files", files={"file": file}, data=form, headers=header("hostile"))
        body = chat(question, knowledge_base="village", k=rng.randrange(1, 9))
    client.post("/v1/chat/completions", json=body, headers=header("hostile"))


def seen(response):
    """All that an answer shows but names made for it and times."""
    body = response.json()
    for name in ("id", "created"):
        body.pop(name, None)
    if "jaxrag" in body:
        body["jaxrag"].pop("timings")
    return response.status_code, json.dumps(body, sort_keys=True)


def answers_of(running, model, village, keys, data, tries, attacked):
    """What the honest tenant sees of a new server, by request."""
    rng, harm = random.Random(5), random.Random(6)
    found = []
    settings = {"keys": str(keys), "data": str(data)}
    with running(model, {"village": village}, **settings) as server:
        for _ in range(tries):
            body = honest_request(rng)
            if attacked:
                attack(harm, server, body)
            answer = server.client.post("/v1/chat/completions", json=body, headers=header("honest"))
            found.append(seen(answer))
        files = server.client.get("/v1/files", headers=header("honest")).json()["data"]
        status = server.state.engine.status()
    # What the load of others drives out of memory is computed again, and told: not meant here.
    assert (files, status.restarts, status.evicted) == ([], 0, 0)
    return found


@pytest.mark.parametrize("tries", [6, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_hostile_tenant_changes_nothing(running, village, keys, tmp_path, tries):
    alone, beside = (
        answers_of(
            running,
            load_model(SHIPPED, cache_tokens=TOKENS_A_TRY * tries),  # a pool of its own, for all
            village, keys, tmp_path / str(attacked), tries, attacked,
        )
        for attacked in (False, True)
    )  # fmt: skip
    assert {status for status, _ in alone} == {200, 400}
    assert beside == alone
