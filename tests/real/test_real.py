"""A pretrained model, SmolLM2-135M-Instruct: what transformers makes of it, and a user's whole way.

`make real` fetches its weights, `make test-real` runs this; without the weights all is skipped. The
goldens are of scripts/make_real_goldens.py.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

import jaxrag
from jaxrag.engine.engine import engine_of
from jaxrag.engine.request import Prompt, Request
from jaxrag.measure.evals.gate import kl_divergence
from jaxrag.reuse.methods import METHODS

ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
GOLDENS = json.loads((ROOT / "tests" / "goldens" / "smollm2.json").read_text(encoding="utf-8"))
HANDBOOK = ROOT / "examples" / "handbook"
LINES = (ROOT / "examples" / "handbook-questions.jsonl").read_text(encoding="utf-8").splitlines()
QUESTIONS = [json.loads(line)["question"] for line in LINES]
SAYS = {"role": "user", "content": "Write one line: 語 naïve 🙂 Ω"}

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not MODEL.is_file(), reason="no weights: `make real` fetches them"),
]


@pytest.fixture(scope="module")
def model():
    return jaxrag.load_model(MODEL, dtype="float32")


@pytest.fixture(scope="module")
def kb(model, tmp_path_factory):
    """Three chapters of the handbook."""
    folder = tmp_path_factory.mktemp("kb")
    chapters = [HANDBOOK / name for name in sorted(os.listdir(HANDBOOK))[4:7]]
    settings = {"chunk_tokens": 256, "stored": "native"}  # exact where all is computed again
    with jaxrag.KnowledgeBase.open(folder / "kb", model=model, **settings) as opened:
        opened.add(jaxrag.read_paths(chapters))
        yield opened


def run(*arguments):
    """What the command line prints."""
    ran = subprocess.run([sys.executable, "-m", "jaxrag", *map(str, arguments)], check=True,
                         cwd=ROOT, capture_output=True, text=True)  # fmt: skip
    return ran.stdout


def test_prompts_are_rendered_and_cut_as_by_transformers(model):
    for row in GOLDENS["rows"]:
        text = model.tokenizer.render_chat(row["messages"])
        assert list(model.tokenizer.encode(text, special=True)) == row["ids"]


def test_logits_are_those_of_transformers(model):
    for row in GOLDENS["rows"]:
        found = np.asarray(model.logits(np.array([row["ids"]])))[0, -1]
        np.testing.assert_allclose(found[GOLDENS["places"]], row["logits"], atol=2e-3)


def test_answers_are_those_of_transformers(model):
    engine, nothing = engine_of(model), np.zeros(0, np.int32)
    for row in GOLDENS["rows"]:
        prompt = Prompt(nothing, (), np.array(row["ids"], np.int32))
        asked = Request(prompt, engine.memory, METHODS["full_attention"], len(row["answer"]))
        assert [it for told in engine.iterate([asked]) for it in told.new] == row["answer"]


def test_int8_weights_are_near(model):
    """Of eight pages of 256 tokens of the handbook; behind the first 16 of each."""
    text = "".join((HANDBOOK / name).read_text() for name in sorted(os.listdir(HANDBOOK))[3:6])
    pages = np.array(model.tokenizer.encode(text)[:2048]).reshape(8, 256)
    int8 = model.decoding_with("int8").decoder(256, weights="decode").params
    wanted, found = (
        np.asarray(dataclasses.replace(model, params=params).logits(pages))[:, 16:]
        for params in (model.params, int8)
    )
    kl = [kl_divergence(*page).mean() for page in zip(wanted, found, strict=True)]
    assert 1e-4 < np.mean(kl) < 0.007, np.mean(kl)
    assert (wanted.argmax(-1) == found.argmax(-1)).mean() > 0.9


@pytest.mark.parametrize("question", QUESTIONS[4:9])
def test_all_tokens_computed_again_are_full_attention(kb, question):
    settings = {"kb": kb, "k": 3, "max_new_tokens": 16}
    full = jaxrag.generate(question, method="full_attention", **settings)
    again = jaxrag.generate(question, method="primed_fusion", recompute_ratio=1.0, **settings)
    assert again.token_ids == full.token_ids
    assert again.counts["recomputed"] > again.counts["reused"]  # of one chunk behind the prefix


def test_a_batch_answers_as_each_alone(kb):
    settings = {"kb": kb, "k": 2, "max_new_tokens": 12, "method": "primed_fusion"}
    alone = [jaxrag.generate(question, **settings).token_ids for question in QUESTIONS[4:8]]
    together = jaxrag.generate(QUESTIONS[4:8], **settings)
    assert [one.token_ids for one in together] == alone


def test_from_a_file_to_an_answer(tmp_path):
    chapter = HANDBOOK / "06-cableway.md"
    run("ingest", chapter, "--kb", tmp_path / "kb", "--model", MODEL, "--chunk-tokens", 256)
    asked = ("ask", QUESTIONS[7], "--kb", tmp_path / "kb", "--k", 2, "--json")
    first, second = (json.loads(run(*asked)) for _ in range(2))
    assert first["text"] and first["text"] == second["text"]
    assert first["counts"]["reused"] and first["method"] == "primed"
    assert not first["counts"]["recomputed"] and not first["counts"]["encoded"]


def test_the_demo(tmp_path):
    shown = json.loads(run("demo", "--model", MODEL, "--work", tmp_path, "--json"))
    assert shown["questions"] == len(shown["asked"]) == 6
    assert shown["computed"]["reuse"] < shown["computed"]["full_attention"] / 4
    assert shown["ttft"]["reuse"] < shown["ttft"]["full_attention"]
    assert all(one[way]["text"] for one in shown["asked"] for way in ("full_attention", "reuse"))


def test_stock_clients_over_http(kb, tmp_path):
    log = (tmp_path / "log").open("w")
    command = [
        sys.executable,
        "-m",
        "jaxrag",
        "serve",
        "--model",
        MODEL,
        "--port",
        "0",
        "--no-warm-up",
    ]
    server = subprocess.Popen([*map(str, command)], stdout=log, stderr=log, cwd=ROOT)
    try:
        url = None
        while url is None:
            assert server.poll() is None, (tmp_path / "log").read_text()
            said = (tmp_path / "log").read_text().split()
            url = next((it for it in said if it.startswith("http://")), None)
            time.sleep(0.2)
        while httpx.get(f"{url}/health").status_code != 200:
            time.sleep(0.5)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
            name = client.models.list().data[0].id
            asked = {"model": name, "messages": [SAYS], "max_tokens": 24, "temperature": 0}
            whole = client.chat.completions.create(**asked).choices[0].message.content
            stream = client.chat.completions.create(**asked, stream=True)
            parts = [it.choices[0].delta.content or "" for it in stream if it.choices]
        assert "".join(parts) == whole and "\ufffd" not in whole and len(parts) > 2
    finally:
        server.terminate()
        server.wait(60)
        log.close()
