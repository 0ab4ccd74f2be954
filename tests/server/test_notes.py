"""Unknown fields are ignored by every endpoint that reads JSON, and its answer says which."""

import re
from pathlib import Path

import pytest

from jaxrag.server.fields import Fields, Generation, ignored

PAGES = Path(__file__).parents[2] / "docs"
STORES = "/v1/vector_stores"
SEARCH = {"type": "file_search", "vector_store_ids": ["village"]}
UNKNOWN = {"nobody": [1], "nothing": None}
ECHO = {"prompt": "Giso Berow", "echo": True, "logprobs": 1, "max_tokens": 0}


def named(answer):
    """The fields that the notes of an answer name."""
    assert answer.status_code == 200, answer.text
    notes = answer.json().get("jaxrag", {}).get("notes", [])
    found = [it for it in notes if it.startswith("unknown fields")]
    assert len(found) <= 1
    return found[0].partition("[")[2].rpartition("]")[0].replace("'", "") if found else ""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Kora Felell"}]}),
        ("/v1/completions", {"prompt": "Giso Berow", "max_tokens": 1}),
        ("/v1/completions", ECHO),
        ("/v1/responses", {"input": "Kora Felell"}),
        (f"{STORES}/village/search", {"query": "Kora Felell"}),
        ("/tokenize", {"prompt": "Giso", "model": "synthetic"}),
        ("/detokenize", {"tokens": [5], "model": "synthetic"}),
        ("/markdown", {"texts": ["*a*"]}),
    ],
)
def test_what_is_unknown_is_named(server, path, body):
    assert named(server.post(path, **body)) == ""
    assert named(server.post(path, **body, **UNKNOWN)) == "nobody"


def test_what_is_unknown_of_documents_is_named(kept):
    client, files = kept.client, {"file": ("a.txt", b"Giso Berow lives.")}
    assert named(client.post("/v1/files", files=files, data={"purpose": "user_data"})) == ""
    uploaded = client.post("/v1/files", files=files, data={"expires_after[seconds]": "3600"})
    assert named(uploaded) == "expires_after[seconds]"
    file = uploaded.json()["id"]
    cut = {"type": "auto", "size": 3}
    made = kept.post(STORES, chunking_strategy=cut, description="", **UNKNOWN)
    assert named(made) == "description, nobody, chunking_strategy.size"
    store = f"{STORES}/{made.json()['id']}"
    assert named(client.get(store)) == ""
    assert named(kept.post(store, name="b", file_ids=[file])) == "file_ids"
    assert named(kept.post(f"{store}/files", file_id=file, **UNKNOWN)) == "nobody"
    assert named(kept.post(f"{store}/files/{file}", attributes={}, file_id="b")) == "file_id"
    batch = kept.post(f"{store}/file_batches", files=[{"file_id": file, "why": 1}])
    assert named(batch) == "files[0].why"


@pytest.mark.parametrize(
    ("path", "body", "places"),
    [
        (
            "/v1/responses",
            {"tools": [SEARCH | {"ranking_options": {"ranker": "auto"}}], "text": {"tone": "low"}},
            ("tools[0].ranking_options.ranker", "text.tone"),
        ),
        (
            "/v1/chat/completions",
            {"stream_options": {"include_usage": False, "include_obfuscation": True}},
            ("stream_options.include_obfuscation",),
        ),
        (
            "/v1/chat/completions",
            {"documents": ["a", {"text": "b", "id": 7, "page": 2}]},
            ("documents[1].page",),
        ),
    ],
)
def test_it_is_named_by_its_place(server, path, body, places):
    asked = {"input": "Kora Felell"}
    if path.endswith("completions"):
        asked = {"messages": [{"role": "user", "content": "Kora Felell"}]}
    answer = server.post(path, **asked, **body)
    assert answer.status_code == 200, answer.text
    notes = " ".join(answer.json()["jaxrag"]["notes"])
    assert all(it in notes for it in places)


def test_of_very_many_the_first_are_kept_and_named():
    read = Generation.read({f"x{number}": number for number in range(100_000)})
    assert len(read.model_extra) == 17
    [note] = ignored(read)
    assert "['x0', 'x1'," in note and "'x15', ...]" in note


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/v1/chat/completions", {"stream_options": {"include_usage": 1}}, "stream_options",
         "stream_options.include_usage=1: expected true or false"),
        ("/v1/completions", {"prompt": "a", "documents": ["a", 5]}, "documents",
         "documents[1].text=5: expected a text, token ids, or an object"),
        ("/v1/completions", {"prompt": "a", "documents": [{"text": "a", "title": 5}]}, "documents",
         "documents[0].title=5: expected a text"),
        (f"{STORES}/vs_0/files", {"file_id": ""}, "file_id", "file_id='': expected a text that is"),
        (f"{STORES}/vs_0/file_batches", {"file_ids": ["x" * 65]}, "file_ids", "at most 64"),
        ("/v1/completions", {"prompt": "a", "functions": {}, "function_call": "none"}, "functions",
         "expected a list"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_by_its_place(kept, path, body, param, words):
    answer = kept.post(path, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert words in error["message"]


def models(of=Fields):
    """All that bodies, and objects in them, are read as."""
    for model in of.__subclasses__():
        if model.__module__.startswith("jaxrag."):
            yield model
            yield from models(model)


def test_the_reference_names_every_field(server):
    pages = [
        (PAGES / it).read_text(encoding="utf-8") for it in ("server.md", "server-reference.md")
    ]
    prose = re.sub(r"(?s)```.*?```", "", "".join(pages))
    known = set(re.findall(r"[a-z_]+", " ".join(re.findall(r"`([^`\n]+)`", prose))))
    missing = {name for model in models() for name in model.names()} - known
    assert len(list(models())) > 20 and not missing
