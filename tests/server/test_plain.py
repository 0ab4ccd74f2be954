"""Passages pasted into a chat, over HTTP: `base_url` is all that a client changes."""

import asyncio
import json
import time

import pytest
from refusal import refused

from jaxrag.base.errors import ConfigError
from jaxrag.cli import main
from jaxrag.models.model import load_model
from jaxrag.models.text import passages
from jaxrag.reuse.encode import packed
from jaxrag.server.settings import ServerSettings
from jaxrag.server.state.state import make_state

PASSAGES = ["Otters eat fish and sleep at day. " * 4, "Bees fly high over fields. " * 5]
LARGE = ("jit(run_packed)", "jit(_place)", "jit(_layer)", "jit(_whole_steps)", "jit(_some_layers)")
PLAIN = {"plain": "passages", "warm_up": False}


@pytest.fixture(scope="module")
def serving(start, trained_dir, rules_file):
    model = load_model(trained_dir, cache_tokens=8192)
    with start(model, {}, passage_rules=rules_file, **PLAIN) as running:
        yield running


def messages(passages):
    pasted = "\n".join(f'<source id="{i}">{it}</source>' for i, it in enumerate(passages))
    return [{"role": "user", "content": f"{pasted}\n\nWho sleeps?"}]


def ask(serving, passages, **body):
    body |= {"messages": messages(passages), "max_tokens": 4}
    return serving.post("/v1/chat/completions", **body).raise_for_status().json()


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_passages_are_read_from_kv_in_another_order(serving):
    first = ask(serving, PASSAGES)
    again = ask(serving, PASSAGES[::-1])
    assert cached(first) == 0
    assert cached(again) > 0.5 * again["usage"]["prompt_tokens"]
    rows = [row["how"] for row in again["jaxrag"]["reuse"] if row["part"].startswith("chunk")]
    assert rows == ["chunk hit"] * 2
    places = [source["document_id"] for source in again["jaxrag"]["sources"]]
    assert places == ["messages[0]"] * 2
    assert ask(serving, PASSAGES)["choices"] == first["choices"]


def test_no_passage_waits_for_its_encoding_to_be_compiled(
    start, trained_dir, rules_file, monkeypatch
):
    model, shapes, encode = load_model(trained_dir, cache_tokens=8192), set(), packed.run_packed

    def recorded(params, config, tokens, rope):
        if params is model.params:  # other servers of this process encode as well
            shapes.add(tokens.ids.shape)
        return encode(params, config, tokens, rope)

    monkeypatch.setattr(packed, "run_packed", recorded)
    how = PLAIN | {"warm_up": True, "passage_rules": rules_file}
    with start(model, {}, **how) as running:
        while running.state.phase != "ready" or running.state.compiling is not None:
            time.sleep(0.05)
        ready = set(shapes)
        compiled = dict(running.state.engine.compiled)
        long = ["Words of a passage that is long. " * count for count in (3, 9, 15)]
        for passages in ([*PASSAGES, *long], ["hi there, who reads " * 60]):
            assert cached(ask(running, passages)) == 0
        for name in LARGE:
            assert running.state.engine.compiled.get(name) == compiled.get(name), name
    assert ready and shapes == ready


def test_a_server_without_it_says_so(start, trained_dir):
    model = load_model(trained_dir, cache_tokens=2048)
    with start(model, {}, **PLAIN | {"plain": "off"}) as running:
        body = {"messages": messages(PASSAGES), "plain": "passages"}
        answer = running.post("/v1/chat/completions", **body)
        assert answer.status_code == 400
        assert "started without --plain" in answer.json()["error"]["message"]


def test_weights_that_nothing_speaks_for_are_refused(chat_model_dir, served_model):
    model = load_model(chat_model_dir, cache_tokens=2048)
    with refused(ConfigError, "--plain-ungated"):
        make_state(ServerSettings(**PLAIN), model)
    make_state(ServerSettings(plain_ungated=True, **PLAIN), model).close()
    with refused(ConfigError):
        make_state(ServerSettings(**PLAIN), served_model)


def test_a_request_is_shown_as_it_would_be_read(trained_dir, rules_file, tmp_path, capsys):
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"messages": messages(PASSAGES)}))
    words = ["plain", str(request), "--model", str(trained_dir), "--passage-rules", rules_file]
    assert main([*words, "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)["parts"]
    blocks = [part["text"] for part in parts if part["kind"] == "block"]
    assert blocks == [it.strip() for it in PASSAGES]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "tokens are read from KV at second sight" in shown
    assert "Who sleeps?" in shown
    request.write_text("[")
    assert main(words) == 1
    assert "expected JSON with messages" in capsys.readouterr().err


def test_an_answer_says_what_was_read_as_blocks_and_from_where(start, trained_dir, rules_file):
    model = load_model(trained_dir, cache_tokens=8192)
    with start(model, {}, passage_rules=rules_file, **PLAIN) as running:
        first, again = ask(running, PASSAGES), ask(running, PASSAGES[::-1])
        content = messages(PASSAGES[::-1])[0]["content"]
        spans = again["jaxrag"]["plain"]
        assert [content[it["start"] : it["end"]] for it in spans] == [
            text.strip() for text in PASSAGES[::-1]
        ]
        assert [it["message"] for it in spans] == [0, 0]
        assert {it["how"] for it in first["jaxrag"]["plain"]} == {"first sight"}
        assert {it["how"] for it in spans} <= {"pool", "host", "store"}
        of_passages = sum(it["tokens"] for it in spans)
        prefix = [it["tokens"] for it in again["jaxrag"]["reuse"] if it["how"] == "prefix hit"]
        assert cached(again) == of_passages + sum(prefix)
        written = first["usage"]["prompt_tokens_details"]["cache_write_tokens"]
        assert written == of_passages
        page = running.client.get("/metrics").text
        counted = {
            line.partition('"')[2].partition('"')[0]: float(line.split()[1])
            for line in page.splitlines()
            if line.startswith("jaxrag_passage_tokens_total{")
        }
        assert counted.pop("first_sight") == sum(counted.values()) == of_passages
        assert 'jaxrag_known_texts_total{result="hit"} 0.0' not in page


def test_a_fingerprint_is_of_what_an_answer_depends_on(serving):
    first = ask(serving, PASSAGES)["system_fingerprint"]
    assert ask(serving, PASSAGES[::-1])["system_fingerprint"] == first
    ratio = ask(serving, PASSAGES, method="cacheblend")["system_fingerprint"]
    other = ask(serving, PASSAGES, method="cacheblend", recompute_ratio=0.5)["system_fingerprint"]
    assert len({first, ratio, other}) == 3
    body = {"messages": messages(PASSAGES), "max_tokens": 4, "stream": True}
    for options in ({}, {"include_usage": True}):
        events = serving.post("/v1/chat/completions", stream_options=options, **body).text
        last = json.loads(events.split("data: ")[-2])
        assert last["system_fingerprint"] == first
        assert len(last["jaxrag"]["plain"]) == 2
        assert ("usage" in last) == bool(options)


def test_a_header_does_without_too(serving):
    off = {"X-Jaxrag-Plain": "off"}
    body = {"messages": messages(PASSAGES), "max_tokens": 4}

    def post(headers, **more):
        return serving.client.post("/v1/chat/completions", json=body | more, headers=headers)

    answer = post(off).json()
    assert answer["jaxrag"]["sources"] == []
    assert "plain" not in answer["jaxrag"] and "system_fingerprint" not in answer
    assert "send one" in post(off, plain="passages").json()["error"]["message"]
    wrong = post({"X-Jaxrag-Plain": "no"})
    assert wrong.status_code == 400
    assert "expected one of off, passages" in wrong.json()["error"]["message"]


def test_a_completion_is_cut_too(serving):
    prompt = messages(PASSAGES)[0]["content"]
    ask(serving, PASSAGES)
    body = {"prompt": prompt, "max_tokens": 4}
    found = serving.post("/v1/completions", **body).raise_for_status().json()
    spans = found["jaxrag"]["plain"]
    assert [prompt[it["start"] : it["end"]] for it in spans] == [it.strip() for it in PASSAGES]
    assert all(it["how"] != "first sight" for it in spans)
    alone = serving.post("/v1/completions", plain="off", **body).json()
    assert "plain" not in alone["jaxrag"] and cached(alone) == 0
    assert alone["usage"]["prompt_tokens"] == found["usage"]["prompt_tokens"]


def test_hostile_text_is_cut_off_the_event_loop_and_within_bounds(serving, monkeypatch):
    """A thread cuts it; what no context holds is refused before it is cut."""
    in_loop, lengths = [], []

    def cut(text, rules):
        in_loop.append(asyncio._get_running_loop() is not None)
        lengths.append(len(text))
        return passages.cut(text, rules)

    monkeypatch.setattr("jaxrag.serve.plain.cut", cut)
    hostile = '<source>[1] Label: (a b)\n---\n"text": "'
    for size in (8_000, 300_000, passages.MOST_CHARACTERS + 1):
        text = (hostile * (size // len(hostile) + 1))[:size]
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
        answer = serving.post("/v1/chat/completions", **body)
        assert answer.status_code == 400, answer.text  # longer than the model's context
    assert (lengths, in_loop) == ([8_000], [False])
