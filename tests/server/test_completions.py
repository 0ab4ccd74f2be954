"""POST /v1/completions, /tokenize and /detokenize over a real server."""

import json

import numpy as np
import pytest

PATH = "/v1/completions"
PROMPT = "Question: What is the home of Giso Berow? Answer:"
HOME = "What is the home of Giso Berow?"
ANIMAL = "Which animal does Kora Felell keep?"
FILES = ["File 18: Giso Berow lives in Tondorf.", "File 23: Mela Forow works as a judge."]


def texts(told):
    return [it["text"] for it in told["choices"]]


def events(response):
    parts = response.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(it.removeprefix("data: ")) for it in parts[:-2]]


@pytest.fixture(scope="module")
def ids(server):
    return server.post("/tokenize", prompt=PROMPT).json()["tokens"]


def test_a_prompt_alone_is_gone_on_from_as_it_is(server, ids):
    body = {"max_tokens": 5, "ignore_eos": True, "logprobs": 1}
    told = server.post(PATH, prompt=PROMPT, **body).json()
    assert told["object"] == "text_completion" and told["model"] == "synthetic"
    assert told["usage"]["prompt_tokens"] == len(ids)
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert told["jaxrag"]["sources"] == [] and told["jaxrag"]["notes"] == []
    # The reference: greedy tokens and their probabilities by whole forwards.
    model, known, wanted = server.state.model, list(ids), []
    for _ in range(5):
        logits = np.asarray(model.logits([known])[0, -1], np.float64)
        known.append(int(logits.argmax()))
        wanted.append(logits.max() - np.logaddexp.reduce(logits))
    of = told["choices"][0]["logprobs"]
    np.testing.assert_allclose(of["token_logprobs"], wanted, atol=1e-4)
    spelled = model.tokenizer.token_bytes
    assert of["tokens"] == [spelled(it).decode() for it in known[len(ids) :]]
    assert of["top_logprobs"] == [
        {token: at} for token, at in zip(of["tokens"], of["token_logprobs"], strict=True)
    ]
    assert texts(told) == [model.tokenizer.decode(known[len(ids) :])]
    assert of["text_offset"][0] == 0 and of["text_offset"] == sorted(of["text_offset"])


def test_prompts_may_be_texts_or_ids_one_or_many(server, ids):
    body = {"max_tokens": 3, "temperature": 0}
    one = server.post(PATH, prompt=PROMPT, **body).json()
    assert texts(server.post(PATH, prompt=ids, **body).json()) == texts(one)
    other = PROMPT.replace("home", "job")
    many = server.post(PATH, prompt=[PROMPT, other, PROMPT], **body).json()
    assert [it["index"] for it in many["choices"]] == [0, 1, 2]
    assert texts(many)[0] == texts(many)[2] == texts(one)[0]
    listed = server.post(PATH, prompt=[ids, ids], **body).json()
    assert texts(listed) == texts(one) * 2
    usage = one["usage"]
    assert listed["usage"]["prompt_tokens"] == 2 * usage["prompt_tokens"]
    assert listed["usage"]["completion_tokens"] == 2 * usage["completion_tokens"]
    assert len(many["jaxrag"]) == 3


def test_streams_of_many_prompts_say_the_same(server, ids):
    body = {
        "prompt": [ids, ids[:-3], ids[:-5]], "max_tokens": 6, "temperature": 30, "seed": 3,
        "ignore_eos": True, "logprobs": 0,
    }  # fmt: skip
    whole = server.post(PATH, **body).json()
    told = events(server.post(PATH, **body, stream=True, stream_options={"include_usage": True}))
    assert told[-1]["usage"] == whole["usage"] and told[-1]["choices"] == []
    assert len(told[-1]["jaxrag"]) == 3
    for place, choice in enumerate(whole["choices"]):
        own = [it for one in told[:-1] for it in one["choices"] if it["index"] == place]
        assert "".join(it["text"] for it in own) == choice["text"]
        assert [it["finish_reason"] for it in own] == [None] * (len(own) - 1) + ["length"]
        for name, values in choice["logprobs"].items():
            assert [it for one in own[:-1] for it in one["logprobs"][name]] == values
    short = events(server.post(PATH, **body, stream=True))
    assert [("jaxrag" in it) for it in short] == [False] * (len(short) - 1) + [True]
    assert short[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("named", ["documents", "model", "knowledge_base"])
def test_a_prompt_over_chunks_is_a_question(server, named):
    body = {
        "documents": {"documents": FILES},
        "model": {"model": "synthetic@village"},
        "knowledge_base": {"knowledge_base": "village"},
    }[named]
    asked, answer = (HOME, "Tondorf") if named == "documents" else (ANIMAL, "falcon")
    told = server.post(PATH, prompt=asked, **body).json()
    assert texts(told) == [answer]
    assert told["jaxrag"]["sources"]


def test_token_ids_over_token_ids_stand_as_they_are(server, ids):
    chunks = [server.post("/tokenize", content=it).json()["tokens"] for it in FILES]
    told = server.post(PATH, prompt=ids, documents=chunks, max_tokens=2).json()
    again = server.post(PATH, prompt=ids, documents=chunks, max_tokens=2).json()
    parts = [(it["part"], it["tokens"]) for it in told["jaxrag"]["reuse"]]
    assert parts == [("chunk 0", len(chunks[0])), ("chunk 1", len(chunks[1]))]
    assert told["usage"]["prompt_tokens"] == len(ids) + sum(map(len, chunks))
    assert texts(again) == texts(told)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == sum(map(len, chunks))


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (None, "a text, token ids"),
        ([], "a text, token ids"),
        ([[]], "of lists of token ids"),
        (["x", [1]], "a list of texts alone"),
        ([1, "x"], "a list of texts alone"),
        ([1, -5], "outside the vocabulary"),
        ([512], "outside the vocabulary"),
        (["x"] * 65, "at most 64"),
        ([1] * 2000, "the model's context is 1024"),
        ([True], "a list of texts alone"),
    ],
)
def test_a_prompt_that_is_none_is_refused(server, prompt, words):
    answer = server.post(PATH, prompt=prompt)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "prompt")
    assert words in error["message"]


def test_tokens_go_there_and_back(server, ids):
    told = server.post("/tokenize", prompt=PROMPT, return_token_strs=True).json()
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert told["max_model_len"] == 1024
    assert ids[0] == 0, "led by BOS"
    bare = server.post("/tokenize", prompt=PROMPT, add_special_tokens=False).json()["tokens"]
    assert (
        bare
        == server.post("/tokenize", content=PROMPT, add_special_tokens=False).json()["tokens"]
        == ids[1:]
    )
    assert server.post("/detokenize", tokens=bare).json()["prompt"] == PROMPT
    assert server.post("/detokenize", tokens=[]).json() == {"prompt": "", "content": ""}
    refused = server.post("/detokenize", tokens=[10**30]).json()["error"]
    assert refused["param"] == "tokens" and "token ids" in refused["message"]


def test_messages_are_counted_as_they_are_asked(server):
    messages = [{"role": "user", "content": HOME}]
    counted = server.post("/tokenize", messages=messages).json()
    asked = server.post("/v1/chat/completions", messages=messages, documents=[]).json()
    assert counted["count"] == asked["usage"]["prompt_tokens"]
