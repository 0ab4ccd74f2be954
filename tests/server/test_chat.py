"""POST /v1/chat/completions over a real server."""

import json

import pytest

from jaxrag.serve.answers import NOTHING_FOUND
from jaxrag.serve.generate import generate

CHAT = "/v1/chat/completions"
QUESTION = "Which animal does Kora Felell keep?"
FILES = ["File 18: Giso Berow lives in Tondorf.", "File 23: Mela Forow works as a judge."]
HOME = "What is the home of Giso Berow?"
JOB = "What is the job of Mela Forow?"


def text_of(told):
    return told["choices"][0]["message"]["content"]


def user(text):
    return {"role": "user", "content": text}


def events(response):
    """The objects of a stream that ended well."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(it.removeprefix("data: ")) for it in parts[:-2] if it.startswith("data: ")]


def test_a_chat_answers_from_the_default_knowledge_base(server):
    told = server.chat().json()
    assert (text_of(told), told["choices"][0]["finish_reason"]) == ("falcon", "stop")
    assert told["object"] == "chat.completion"
    assert told["model"] == "synthetic@village"
    first = told["jaxrag"]["sources"][0]
    assert (first["document_id"], first["file"]) == ("kora-felell.md", "kora-felell.md")
    assert "text" not in first


@pytest.mark.parametrize(
    ("model", "body", "headers"),
    [
        ("synthetic@village", {}, {}),
        ("synthetic", {"knowledge_base": "village"}, {}),
        (None, {}, {"X-Knowledge-Base": "village"}),
        ("synthetic@village", {"knowledge_base": "village"}, {"X-Knowledge-Base": "village"}),
    ],
)
def test_a_knowledge_base_is_named_in_three_ways(server, model, body, headers):
    body = {"model": model, "messages": [user(QUESTION)], "return_text": True, **body}
    told = server.client.post(CHAT, json=body, headers=headers).json()
    assert text_of(told) == "falcon"
    assert "Kora Felell" in told["jaxrag"]["sources"][0]["text"]


def test_the_answer_is_that_of_generate(server, village):
    kb = server.state.knowledge_bases["village"]
    direct = generate(messages=[user(QUESTION)], kb=kb, k=2, max_new_tokens=8)
    told = server.chat(k=2).json()
    assert text_of(told) == direct.text
    account = direct.to_dict()
    same = ("sources", "counts", "flops", "method", "notes")
    for source in account["sources"]:
        del source["text"]
        source["file"] = source["file"].rpartition("/")[2]
    assert {name: told["jaxrag"][name] for name in same} == {n: account[n] for n in same}
    assert set(told["jaxrag"]["timings"]) == set(direct.timings)
    assert [it["part"] for it in told["jaxrag"]["reuse"]] == [row.part for row in direct.reuse]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": "full_attention", "prefix_cache": False},
        {"method": "fusionrag", "recompute_ratio": 0.5},
        {"method": "ape"},
    ],
    ids=["reused", "computed", "both", "ape"],
)
def test_usage_adds_up_and_is_equal_in_a_stream(server, options):
    server.chat(**options)  # what is encoded on the way is there from now on
    whole = server.chat(**options).json()
    usage, told = whole["usage"], whole["jaxrag"]
    streamed = events(server.chat(**options, stream=True, stream_options={"include_usage": True}))
    assert streamed[-1]["usage"] == usage
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    prefix = next((row for row in told["reuse"] if row["part"] == "prefix"), None)
    parts = sum(row["tokens"] for row in told["reuse"])
    final = usage["prompt_tokens"] - parts
    assert final > 0
    computed = final + told["counts"]["recomputed"] + told["counts"]["encoded"]
    computed += prefix["tokens"] if prefix["how"] in ("encoded", "computed") else 0
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached + computed == usage["prompt_tokens"]
    assert (cached > 0) == (options.get("method") != "full_attention")


def test_tokens_that_are_encoded_are_written_and_not_cached(server):
    documents = ["File 30: Bada Fivin lives in Tondorf.", "File 31: Bada Fivin works as a judge."]
    once = server.chat(HOME, documents=documents).json()
    again = server.chat(HOME, documents=documents).json()
    first, second = (it["usage"]["prompt_tokens_details"] for it in (once, again))
    written = sum(row["tokens"] for row in once["jaxrag"]["reuse"] if row["how"] == "encoded")
    assert written > 0
    assert first == {"cached_tokens": first["cached_tokens"], "cache_write_tokens": written}
    assert second["cached_tokens"] == first["cached_tokens"] + written
    assert second["cache_write_tokens"] == 0


def test_a_stream_has_its_parts_in_order(server):
    told = events(server.chat(stream=True))
    deltas = [it["choices"][0]["delta"] for it in told]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(it["content"] for it in deltas[:-1]) == "falcon"
    assert deltas[-1] == {}
    reasons = [it["choices"][0]["finish_reason"] for it in told]
    assert reasons == [None] * (len(told) - 1) + ["stop"]
    assert {it["object"] for it in told} == {"chat.completion.chunk"}
    assert len({it["id"] for it in told}) == 1
    assert "usage" not in told[-1]
    assert told[-1]["jaxrag"]["counts"] == server.chat().json()["jaxrag"]["counts"]


@pytest.mark.parametrize(
    "documents",
    [
        FILES,
        [{"text": text} for text in FILES],
        [{"title": "of the village", "text": text, "id": at} for at, text in enumerate(FILES)],
    ],
    ids=["texts", "objects", "titled"],
)
def test_documents_are_chunks(server, documents):
    told = server.chat(HOME, documents=documents).json()
    assert text_of(told) == "Tondorf"
    assert told["model"] == "synthetic"
    named = [it.get("id") if isinstance(it, dict) else None for it in documents]
    names = [f"documents[{at}]" if it is None else str(it) for at, it in enumerate(named)]
    assert [it["document_id"] for it in told["jaxrag"]["sources"]] == names


def test_no_documents_is_to_ask_without_any(server):
    told = server.chat(documents=[]).json()
    assert told["jaxrag"]["sources"] == []
    assert told["usage"]["prompt_tokens_details"]["cache_write_tokens"] == 0
    assert told["model"] == "synthetic"


def test_content_may_be_a_list_of_text_parts(server):
    parts = [{"type": "text", "text": QUESTION[:10]}, {"type": "text", "text": QUESTION[10:]}]
    told = server.post(CHAT, messages=[user(parts)]).json()
    assert text_of(told) == "falcon"


def test_history_is_read_behind_the_chunks_and_found_again(server):
    asked = [user(HOME)]
    first = server.post(CHAT, messages=asked, documents=FILES).json()
    asked += [{"role": "assistant", "content": text_of(first)}, user(JOB)]
    second = server.post(CHAT, messages=asked, documents=FILES).json()
    assert text_of(second) == "judge"
    turns = [row for row in second["jaxrag"]["reuse"] if row["part"] == "turn 0"]
    assert [row["how"] for row in turns] == ["prefix hit"]
    alone = server.post(CHAT, messages=asked, documents=FILES, prefix_cache=False).json()
    assert text_of(alone) == "judge"
    turns = [row for row in alone["jaxrag"]["reuse"] if row["part"] == "turn 0"]
    assert [row["how"] for row in turns] == ["computed"]
    blocks = server.post(CHAT, messages=asked, documents=FILES, earlier_turns="blocks").json()
    assert any("blocks" in note for note in blocks["jaxrag"]["notes"])


def test_another_query_finds_other_chunks(server):
    told = server.chat(HOME, query=QUESTION).json()
    assert told["jaxrag"]["sources"][0]["document_id"] == "kora-felell.md"
    assert server.chat(HOME).json()["jaxrag"]["sources"][0]["document_id"] == "giso-berow.md"


def test_no_folder_of_the_server_is_told(server, village):
    # Of all chunks some were not encoded so before, which a note tells.
    told = server.chat(k=20, method="fusionrag", recompute_ratio=0.5, return_text=True)
    assert any("jaxrag ingest" in note for note in told.json()["jaxrag"]["notes"])
    assert str(village.parent) not in told.text and "/examples/" not in told.text


def test_where_narrows_and_k_counts(server):
    assert len(server.chat(k=1).json()["jaxrag"]["sources"]) == 1
    told = server.chat(where={"nothing": "has this"}).json()
    assert told["jaxrag"]["sources"] == []
    assert (text_of(told), told["choices"][0]["finish_reason"]) == (NOTHING_FOUND, "stop")
    assert told["usage"]["total_tokens"] == 0
    assert "it was not asked" in told["jaxrag"]["notes"][0]
    streamed = events(server.chat(where={"nothing": "has this"}, stream=True))
    deltas = [it["choices"][0]["delta"].get("content", "") for it in streamed if it["choices"]]
    assert "".join(deltas) == NOTHING_FOUND


def test_a_least_score_narrows_and_unanswerable_says_what_then(server):
    [best, *_] = server.chat(k=3, search_mode="bm25").json()["jaxrag"]["sources"]
    least = {"k": 3, "search_mode": "bm25", "min_score": best["score"]}
    assert server.chat(**least).json()["jaxrag"]["sources"] == [best]
    nothing = least | {"min_score": best["score"] + 1}
    told = server.chat(**nothing).json()
    assert (text_of(told), told["jaxrag"]["sources"]) == (NOTHING_FOUND, [])
    assert "only chunks with a score of" in told["jaxrag"]["notes"][1]
    asked = server.chat(**nothing, unanswerable="ask").json()
    assert text_of(asked) != NOTHING_FOUND and asked["jaxrag"]["sources"] == []
    assert "it was asked without any" in asked["jaxrag"]["notes"][0]
    prompt = server.post("/v1/completions", prompt=QUESTION, knowledge_base="village", **nothing)
    assert prompt.json()["choices"][0]["text"] == NOTHING_FOUND


def test_stop_ends_an_answer_before_the_text(server):
    drawn = {"ignore_eos": True, "max_tokens": 8, "temperature": 50.0, "seed": 7}
    free = server.chat(**drawn).json()
    words = text_of(free).split()
    assert len(words) > 4 and free["choices"][0]["finish_reason"] == "length"
    at = next(n for n in range(2, 8) if words[n] not in " ".join(words[:n]))
    for stop in (words[at], [words[at], "unheard"]):
        told = server.chat(**drawn, stop=stop).json()
        assert text_of(told).split() == words[:at]
        assert told["choices"][0]["finish_reason"] == "stop"
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        streamed = events(server.chat(**drawn, stop=stop, **stream))
        assert streamed[-1]["usage"] == told["usage"]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_an_answer_is_bounded(server, name):
    told = server.chat(ignore_eos=True, **{name: 3}).json()
    assert told["usage"]["completion_tokens"] == 3
    assert told["choices"][0]["finish_reason"] == "length"


def test_a_seed_says_what_is_drawn(server):
    # So hot that all 512 words are about equally likely: two draws are equal once in 512 ** 6.
    options = {"temperature": 50.0, "ignore_eos": True, "max_tokens": 6, "documents": FILES}

    def drawn(**more):
        return text_of(server.chat(HOME, **{**options, **more}).json())

    assert drawn(seed=5) == drawn(seed=5)
    assert len({drawn(seed=seed) for seed in range(-2, 3)}) > 1
    assert len({drawn() for _ in range(4)}) > 1, "without a seed every draw is another"
    greedy = drawn(seed=1, top_k=1)
    assert greedy == drawn(seed=2, top_p=1e-6) == drawn(seed=3, temperature=0)
    assert drawn(seed=5, top_k=-1) == drawn(seed=5)


def test_logprobs_are_those_of_the_chosen_tokens(server):
    options = {"logprobs": True, "ignore_eos": True, "max_tokens": 4}
    whole = server.chat(**options).json()
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == 4 == whole["usage"]["completion_tokens"]
    assert all(it["logprob"] <= 0 and it["top_logprobs"] == [] for it in content)
    assert content[0]["logprob"] > -0.1, "of this answer the model is sure"
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"] == " falcon"
    streamed = events(server.chat(**options, stream=True))
    told = [it["choices"][0]["logprobs"] for it in streamed]
    assert [one for it in told if it is not None for one in it["content"]] == content
    assert server.chat().json()["choices"][0]["logprobs"] is None


def test_the_engine_is_asked_as_the_request_says(server, monkeypatch):
    """Rows, class, tenant, time and who reads: seen where the engine is handed the prompt."""
    engine, asked = server.state.engine, []
    add = engine.add

    def seen(request, sink):
        asked.append(request)
        return add(request, sink)

    monkeypatch.setattr(engine, "add", seen)
    for body in (
        {},
        {"stream": True, "priority": 2, "timeout": 7.5},
        {"priority": 0, "timeout": 1e9},
    ):
        assert server.chat(**body).status_code == 200
    assert [it.watched for it in asked] == [False, True, False]
    assert [it.priority for it in asked] == [1, 2, 0]
    assert {it.rows for it in asked} == {server.state.settings.rows}
    assert {it.tenant for it in asked} == {""}
    longest = server.state.settings.max_seconds
    for request, seconds in zip(asked, (longest, 7.5, longest), strict=True):
        assert 0 < request.timeout <= seconds


def test_models_are_listed_with_their_knowledge_bases(server):
    told = server.client.get("/v1/models").json()
    assert [it["id"] for it in told["data"]] == ["synthetic", "synthetic@village"]
    one = server.client.get("/v1/models/synthetic@village").json()
    assert one == told["data"][1]
    assert (one["object"], one["max_model_len"], one["method"]) == ("model", 1024, "turborag")
    assert "fusionrag" in one["methods"] and "snapkv" in one["decode_rules"]
    assert (one["word_level"], one["cites"]) == (True, True)


def test_it_is_healthy_and_ready(server):
    assert server.client.get("/health").json()["status"] == "ok"
    assert server.client.get("/ready").status_code == 200


def test_a_request_has_an_id(server):
    given = server.client.get("/health", headers={"x-request-id": "mine"})
    assert given.headers["x-request-id"] == "mine"
    made = [server.client.get("/health").headers["x-request-id"] for _ in range(2)]
    assert len(set(made)) == 2
