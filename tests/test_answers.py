"""Answers from the village, byte for byte those that are written in goldens/answers.json.

    PYTHONPATH=tests/net python tests/test_answers.py

writes that file. No test does: run it only where answers are meant to change, and say why. Every
method is asked under every decode rule; what is refused is written with the words of its refusal.
The default run takes each method with its own rule and each rule with one method; the slow tests
take all of them.
"""

import contextlib
import dataclasses
import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from net import RULES

from jaxrag import (
    METHODS,
    JaxragError,
    KnowledgeBase,
    SamplingParams,
    generate,
    load_model,
    read_paths,
)

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "goldens" / "answers.json"
MODEL = ROOT / "checkpoints" / "synthetic-0.8m" / "dual"
ALONE = "turborag"  # the method under which the default run takes every rule
QUESTION = "Which animal does Kora Felell keep?"
OF_ALL = ("Who is the teacher of Jodo Dudin?", "File 33: Bada Fivin")  # what is answered at length
OTHERS = (
    "What is the job of Bada Fivin?",
    "What is the home of Giso Berow?",
    "What is the job of the teacher of Liva Bimer?",
    "What is the job of Vula Kinow?",
)
GRID = list(itertools.product(METHODS, RULES))
ALWAYS = [pair for pair in GRID if pair[1] == "dense" or pair[0] == ALONE]
URL = re.compile(r"http://[\w.:]+")
PASSING = re.compile(
    r"^(id|created|timings|system_fingerprint)$"
)  # names of what differs each time


def ingested(folder, model):
    """The village, with all that the methods read."""
    kb = KnowledgeBase.open(
        folder,
        model,
        chunk_by="sentence",
        chunk_tokens=20,
        overlap=0,
        encoders=["isolated", "after_prefix", "neighbours", "primed"],
        neighbours=3,
        stored="native",  # as the golden
    )
    kb.add(read_paths([ROOT / "examples" / "village"]))
    return kb


def told(answer):
    """What an answer says, without what depends on the machine."""
    return {
        "text": answer.text,
        "token_ids": [int(token) for token in answer.token_ids],
        "finish_reason": answer.finish_reason,
        "method": answer.method,
        "counts": answer.counts,
        "flops": answer.flops,
        "indexes": answer.indexes,
        "notes": answer.notes,
        "sources": [[s.document_id, s.chunk_index, lasting(s.score)] for s in answer.sources],
    }


def asked(kb, method, rule):
    """Answers, or why there are none."""
    options = {"method": method, "decode": RULES[rule], "k": 3, "max_new_tokens": 6}
    try:
        return [told(generate(question, kb=kb, **options)) for question in OF_ALL]
    except JaxragError as error:
        return {type(error).__name__: str(error)}


def in_a_batch(kb):
    return [told(it) for it in generate([QUESTION, *OTHERS], kb=kb, k=3, max_new_tokens=6)]


def in_a_stream(kb):
    stream = generate(OTHERS[-1], kb=kb, k=3, max_new_tokens=8, stream=True)
    pieces = list(stream)
    return {"pieces": pieces, "result": told(stream.result)}


def sampled(kb):
    """One seed for all, and one of its own for each."""
    one = SamplingParams(temperature=2.5, top_k=40, top_p=0.9, seed=5)
    each = [dataclasses.replace(one, seed=seed) for seed in range(2)]
    options = {"kb": kb, "k": 3, "max_new_tokens": 6}
    found = generate(list(OF_ALL), sampling=one, **options)
    return [told(it) for it in (*found, *generate(list(OF_ALL), sampling=each, **options))]


def in_a_conversation(kb):
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "falcon"},
        {"role": "user", "content": OTHERS[0]},
    ]
    return [
        told(generate(messages=messages, kb=kb, k=2, earlier_turns=turns, max_new_tokens=6))
        for turns in ("exact", "blocks")
    ]


def over_http(client):
    """Bodies of answers: of a chat, of a stream of one, of a completion, and of a refusal."""
    chat = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 4}
    found = {}
    for name, path, body in (
        ("chat", "/v1/chat/completions", chat),
        ("completion", "/v1/completions", {"prompt": QUESTION, "max_tokens": 4}),
        ("refused", "/v1/chat/completions", {**chat, "method": "none"}),
    ):
        response = client.post(path, json=body)
        found[name] = [response.status_code, lasting(response.json())]
    response = client.post("/v1/chat/completions", json={**chat, "stream": True})
    found["stream"] = [
        lasting(json.loads(line.removeprefix("data: "))) if "{" in line else line
        for line in response.text.splitlines()
        if line.startswith("data: ")
    ]
    return found


def lasting(value):
    """JSON without what differs each time, its numbers rounded."""
    if isinstance(value, dict):
        return {k: lasting(v) for k, v in value.items() if not PASSING.match(k)}
    if isinstance(value, list):
        return [lasting(it) for it in value]
    return round(value, 4) if isinstance(value, float) else value


@contextlib.contextmanager
def served(folder):
    """A client of a server over the knowledge base in a folder: a process, on a free port."""
    httpx = pytest.importorskip("httpx")
    command = [sys.executable, "-m", "jaxrag", "serve", "--kb", f"village={folder}"]
    command += ["--model", MODEL, "--name", "synthetic", "--port", "0", "--no-warm-up", "--k", "3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            told = iter(process.stdout.readline, "")
            url = next(filter(None, map(URL.search, told)))[0]
            with httpx.Client(base_url=url, timeout=60) as client:
                yield client
        finally:
            process.terminate()
            process.communicate()


PARTS = {
    "batch": in_a_batch,
    "stream": in_a_stream,
    "sampled": sampled,
    "conversation": in_a_conversation,
}


@pytest.fixture(scope="module")
def golden():
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def kb(tmp_path_factory):
    with ingested(tmp_path_factory.mktemp("answers") / "village", load_model(MODEL)) as made:
        yield made


def test_every_method_and_every_rule_is_there(golden):
    assert set(golden["grid"]) == {f"{method} {rule}" for method, rule in GRID}
    refused = [pair for pair, told in golden["grid"].items() if isinstance(told, dict)]
    assert all(pair.startswith(("turborag_composite ", "ape ", "packets ")) for pair in refused)
    texts = [told[0]["text"] for told in golden["grid"].values() if isinstance(told, list)]
    assert texts.count("Radia Dalell") > len(METHODS)


@pytest.mark.parametrize(
    ("method", "rule"),
    [pytest.param(*it, marks=() if it in ALWAYS else pytest.mark.slow) for it in GRID],
)
def test_an_answer_is_what_it_was(kb, golden, method, rule):
    assert asked(kb, method, rule) == golden["grid"][f"{method} {rule}"]


@pytest.mark.parametrize("part", PARTS)
def test_several_and_parts_are_what_they_were(kb, golden, part):
    assert PARTS[part](kb) == golden[part]


def test_http_answers_are_what_they_were(kb, golden):
    with served(kb.path) as client:
        assert over_http(client) == golden["http"]


def write():
    """Write the golden."""
    with tempfile.TemporaryDirectory() as work:
        kb = ingested(Path(work, "village"), load_model(MODEL))
        found = {"grid": {f"{method} {rule}": asked(kb, method, rule) for method, rule in GRID}}
        found |= {name: ask(kb) for name, ask in PARTS.items()}
        with served(kb.path) as client:
            found["http"] = over_http(client)
        kb.close()
    rows = (f"{json.dumps(pair)}: {json.dumps(told)}" for pair, told in found.pop("grid").items())
    parts = (f"{json.dumps(name)}: {json.dumps(seen, indent=1)}" for name, seen in found.items())
    grid = '"grid": {\n' + ",\n".join(rows) + "\n}"
    GOLDEN.write_text("{" + ",\n".join([grid, *parts]) + "}\n", encoding="utf-8")


if __name__ == "__main__":
    write()
