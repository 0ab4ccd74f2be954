"""docs/troubleshooting.md over HTTP: each refusal that it quotes is what a client is told."""

import re
from pathlib import Path

import pytest

from jaxrag.models.model import load_model

PAGE = Path(__file__).parents[2] / "docs/troubleshooting.md"
ELSEWHERE = {"several processes give no answers of a form"}  # asks for more than one process
TOOL = {"type": "function", "function": {"name": "clock"}}
SEARCH = {"type": "file_search", "vector_store_ids": ["village"]}
FORM = {"type": "json_object"}
CHATS = (
    {"guided_grammar": "start: a"},
    {"response_format": FORM},
    {"tools": [TOOL]},
    {"tools": [TOOL], "documents": ["a"]},
    {"tools": [TOOL], "blocks": ["a"]},
    {"tools": [TOOL], "knowledge_base": "village"},
    {"functions": [{"name": "f"}]},
    {"prediction": {"type": "content", "content": "x"}},
)
RESPONSES = (
    {"tools": [{"type": "web_search"}]},
    {"tools": [SEARCH, {"type": "function", "name": "clock"}]},
    {"tools": [SEARCH | {"vector_store_ids": ["village", "other"]}]},
    {"background": True},
    {"conversation": "conv_1"},
    {"prompt": {"id": "pmpt_1"}},
    {"reasoning": {"effort": "high"}},
    {"truncation": "auto"},
)


def quoted(*rows):
    """The words of the program that the page quotes in rows that begin so."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    cells = [line.strip("|").split("|") for line in lines if line.startswith("| ")]
    chosen = [row[2] for row in cells if row[0].strip().startswith(rows)]
    assert len(chosen) == len(rows)
    return {words for row in chosen for words in re.findall(r"`([^`]+)`", row)} - ELSEWHERE


def refusal(answer, status=400):
    """The one line that a request was refused with."""
    assert answer.status_code == status, answer.text
    message = answer.json()["error"]["message"]
    assert "\n" not in message
    return message


@pytest.fixture(scope="module")
def told(kept, start, chat_model_dir):
    """What is told by a server of a model of words, and by one whose model has a chat template."""
    with start(load_model(chat_model_dir, cache_tokens=8192), {}) as other:
        servers = (kept, other)
        chats = [refusal(it.chat("Warm?", **body)) for it in servers for body in CHATS[2:]]
        chats += [refusal(kept.chat("Warm?", **body)) for body in CHATS[:2]]
        completions = [refusal(kept.post("/v1/completions", prompt="a", tools=[TOOL]))]
        given = [
            refusal(it.post("/v1/responses", input="a", **b)) for it in servers for b in RESPONSES
        ]
    return chats + completions, given


def test_chats_and_completions_refuse_what_the_page_says(told):
    messages, _ = told
    for words in quoted("answers of a", "tools over", "predicted output"):
        assert any(words in message for message in messages), words
    said = quoted("answers of a", "tools over", "predicted output")
    for message in messages:
        assert any(words in message for words in said), message


def test_responses_refuse_what_the_page_says(told):
    _, messages = told
    said = quoted("in responses")
    assert all(any(words in message for message in messages) for words in said)
    for message in messages:
        assert any(words in message for words in said), message


def test_what_has_no_endpoint(kept):
    (words,) = quoted("uploads in parts")
    assert words in refusal(kept.post("/v1/uploads", filename="a"), 404)
    assert "not found" in refusal(kept.post("/v1/batches"), 404)
    files = {"file": ("a.txt", b"a")}
    data = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    made = kept.client.post("/v1/files", files=files, data=data)
    assert made.status_code == 200 and "expires_at" not in made.json()
