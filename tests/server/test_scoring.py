"""Completions with echo and logprobs: the log-likelihood of a prompt, as harnesses ask for it."""

import concurrent.futures
import json
import os
import subprocess

import jax
import numpy as np
import pytest

from jaxrag.models.model import load_model

PROMPT = "Kora Felell keeps a falcon. Giso Berow lives in Tondorf."


def complete(server, prompt, **body):
    return server.post("/v1/completions", prompt=prompt, **body)


def score(server, prompt, **body):
    answer = complete(server, prompt, echo=True, **{"logprobs": 1, "max_tokens": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def ids_of(model, text):
    """As the server reads a text: behind what the model expects first."""
    tokenizer = model.tokenizer
    return [*tokenizer.leading_ids.tolist(), *tokenizer.encode(text).tolist()]


def expected(model, ids):
    """Log-probabilities after every token, float32 [T, V], by the packed forward."""
    return np.asarray(jax.nn.log_softmax(model.logits(np.asarray(ids)[None])[0]))


@pytest.mark.parametrize("length", [1, 7, 100])
def test_log_likelihoods_are_those_of_the_model(server, served_model, rng, length):
    ids = rng.integers(3, served_model.config.vocab_size, length).tolist()
    told = score(server, ids, logprobs=5)
    [choice] = told["choices"]
    found, truth = choice["logprobs"], expected(served_model, ids)
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    follows = truth[np.arange(length - 1), ids[1:]]
    np.testing.assert_allclose(found["token_logprobs"][1:], follows, atol=1e-4, rtol=0)
    for at in range(length - 1):
        top = found["top_logprobs"][at + 1]
        assert len(top) in (5, 6)
        assert found["token_logprobs"][at + 1] in top.values()
        best = sorted(truth[at])[-5:]
        np.testing.assert_allclose(sorted(top.values())[-5:], best, atol=1e-4, rtol=0)
    assert told["usage"]["prompt_tokens"] == length
    assert told["usage"]["completion_tokens"] == 0


def test_the_next_token_is_the_most_likely_one(server, served_model):
    told = score(server, PROMPT, max_tokens=1, seed=1234, temperature=0)
    [choice] = told["choices"]
    found = choice["logprobs"]
    ids = ids_of(served_model, PROMPT)
    truth = expected(served_model, ids)
    assert len(found["tokens"]) == len(ids) + 1
    best = int(truth[-1].argmax())
    assert found["tokens"][-1] == served_model.tokenizer.decode([best], skip_special=False)
    assert found["token_logprobs"][-1] == pytest.approx(truth[-1].max(), abs=1e-4)
    assert found["top_logprobs"][-1] == {found["tokens"][-1]: found["token_logprobs"][-1]}
    assert choice["text"].startswith(PROMPT)
    assert found["tokens"][0] == "<|begin|>"  # is no part of the text
    for token, offset in list(zip(found["tokens"], found["text_offset"], strict=True))[1:-1]:
        assert choice["text"][offset:].lstrip().startswith(token.strip())


def test_several_prompts_are_scored_as_each_alone(server):
    prompts = [PROMPT, "Kora Felell", f"{PROMPT} {PROMPT}"]
    together = score(server, prompts)
    alone = [score(server, prompt)["choices"][0] for prompt in prompts]
    assert [it["index"] for it in together["choices"]] == [0, 1, 2]
    for one, other in zip(together["choices"], alone, strict=True):
        assert one["logprobs"] == other["logprobs"]
    assert together["usage"]["prompt_tokens"] == sum(len(it["logprobs"]["tokens"]) for it in alone)


def test_is_greedy_can_be_told(server, served_model):
    """As harnesses do: by whether the chosen token's is the largest of those named."""
    found = score(server, PROMPT)["choices"][0]["logprobs"]
    ids = ids_of(served_model, PROMPT)
    truth = expected(served_model, ids).argmax(axis=-1)
    for at in range(1, len(ids)):
        largest = found["token_logprobs"][at] == max(found["top_logprobs"][at].values())
        assert largest == (truth[at - 1] == ids[at])


EMOJI = "Ha \U0001f44b \u4f60\u597d e\u0301 \uae40!"


def test_parts_of_characters_have_names_of_their_own(start, chat_model_dir):
    """No two candidates are one, and a harness is told what is greedy."""
    model = load_model(chat_model_dir, cache_tokens=2048)
    with start(model, {}) as serving:
        ids = model.tokenizer.encode(EMOJI).tolist()
        found = score(serving, ids, logprobs=5)["choices"][0]["logprobs"]
        truth = expected(model, ids)
        assert any(it.startswith("bytes:\\x") for it in found["tokens"])
        for at in range(1, len(ids)):
            top, token = found["top_logprobs"][at], found["tokens"][at]
            assert len(top) == 5 + (ids[at] not in truth[at - 1].argsort()[-5:])
            assert (max(top, key=top.get) == token) == (truth[at - 1].argmax() == ids[at])
        body = {"max_tokens": 12, "ignore_eos": True, "temperature": 9.0, "seed": 2}
        told = complete(serving, EMOJI, logprobs=5, **body).json()["choices"][0]["logprobs"]
        assert all(len(it) in (5, 6) for it in told["top_logprobs"])
        chat = serving.chat("Is it?", logprobs=True, top_logprobs=3, **body).json()["choices"][0]
        spelled = [it for one in chat["logprobs"]["content"] for it in (one, *one["top_logprobs"])]
        assert all(
            it["token"] == bytes(it["bytes"]).decode()
            for it in spelled
            if it["bytes"] is not None and not it["token"].startswith("bytes:")
        )
        parts = [it for it in spelled if it["token"].startswith("bytes:")]
        assert parts and all(it["bytes"] for it in parts)


def test_no_more_than_the_chosen_ones_are_named_for_zero(server):
    found = score(server, PROMPT, logprobs=0)["choices"][0]["logprobs"]
    assert all(len(it) == 1 for it in found["top_logprobs"][1:])


def test_scoring_goes_on_beside_chats(server):
    question = "Which animal does Kora Felell keep?"
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        scores = [threads.submit(score, server, [PROMPT] * 4) for _ in range(3)]
        chats = [threads.submit(server.chat, question) for _ in range(4)]
        told = [it.result()["choices"] for it in scores]
        answers = [it.result().json()["choices"][0]["message"]["content"] for it in chats]
    assert answers == ["falcon"] * 4
    first = told[0][0]["logprobs"]
    assert all(choice["logprobs"] == first for choices in told for choice in choices)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": ["Kora Felell keeps a falcon."]}, "documents"),
        ({"knowledge_base": "village"}, "knowledge_base"),
        ({"model": "synthetic@village"}, "knowledge_base"),
        ({"logprobs": None}, "echo"),
        ({"logprobs": 6}, "logprobs"),
        ({"max_tokens": 2}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 0.5}, "temperature"),
        ({"stream": True}, "stream"),
        ({"prompt": [[1, 10**6]]}, "prompt"),
        ({"prompt": [5] * 9000}, "prompt"),
    ],
)
def test_what_cannot_be_scored(server, body, param):
    base = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = server.post("/v1/completions", **{**base, **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_what_a_tokenizer_is(server):
    told = server.client.get("/tokenizer_info").json()
    assert told["eos_token"] and set(told) >= {"bos_token", "pad_token", "chat_template"}


TASK = """
task: answers
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: [" falcon", " judge"]
doc_to_target: label
"""


SAYS = """
task: says
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "falcon"
generation_kwargs: {until: ["."], max_gen_toks: 4, do_sample: false}
metric_list: [{metric: exact_match}]
"""


@pytest.mark.slow
def test_a_harness_scores_through_the_server(server, served_model, tmp_path):
    """lm-evaluation-harness, where LM_EVAL_PYTHON names an interpreter that has it."""
    python = os.environ.get("LM_EVAL_PYTHON")
    if python is None:
        pytest.skip("LM_EVAL_PYTHON is not set: name a python with lm_eval[api]")
    texts = ["Kora Felell keeps a", "Giso Berow lives in", "Mela Forow works as a"]
    lines = [{"text": text, "label": at % 2} for at, text in enumerate(texts)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    for name, task in (("answers", TASK), ("says", SAYS)):
        text = task.replace("FILE", str(tmp_path / "data.jsonl"))
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
    where = f"base_url={server.url}/v1/completions,model=synthetic,tokenizer_backend=remote"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", where,
         "--tasks", "answers,says", "--include_path", str(tmp_path), "--batch_size", "2",
         "--log_samples", "--output_path", str(tmp_path / "out")],
        env={**environment, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
             "HF_HOME": str(tmp_path / "home")},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    [said] = (tmp_path / "out").rglob("samples_says_*.jsonl")
    for sample in map(json.loads, said.read_text(encoding="utf-8").splitlines()):
        ids = served_model.tokenizer.encode(lines[sample["doc_id"]]["text"]).tolist()
        told = server.post("/v1/completions", prompt=ids, max_tokens=4, stop=["."]).json()
        assert sample["resps"] == [[told["choices"][0]["text"]]]
    [samples] = (tmp_path / "out").rglob("samples_answers_*.jsonl")
    found = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    assert len(found) == len(texts)
    for sample in found:
        text = lines[sample["doc_id"]]["text"]
        for choice, response in zip((" falcon", " judge"), sample["resps"], strict=True):
            ids = served_model.tokenizer.encode(text + choice)
            start = len(served_model.tokenizer.encode(text))
            truth = expected(served_model, ids)
            likely = sum(truth[at - 1, ids[at]] for at in range(start, len(ids)))
            greedy = all(truth[at - 1].argmax() == ids[at] for at in range(start, len(ids)))
            told, is_greedy = response[0]
            assert float(told) == pytest.approx(likely, abs=1e-4)
            assert str(is_greedy) == str(greedy)
