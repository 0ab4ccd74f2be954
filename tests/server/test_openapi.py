"""What is answered is what OpenAI's published description says, call by call and event by event.

The description is no part of the project: JAXRAG_OPENAPI names a copy of openapi.json (or .yaml)
from https://github.com/openai/openai-openapi.
"""

import functools
import json
import operator
import os
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.models.model import load_model

PATH = os.environ.get("JAXRAG_OPENAPI")
pytestmark = pytest.mark.skipif(
    PATH is None, reason="JAXRAG_OPENAPI names no copy of OpenAI's openapi.json"
)
HERE, OWN = "urn:description", "jaxrag"
STORE = "/vector_stores/{vector_store_id}"
MEMBER = f"{STORE}/files/{{file_id}}"
BATCH = f"{STORE}/file_batches/{{batch_id}}"
STORY = b"File 23: Giso Berow lives in Tondorf.\n"
HOME = "What is the home of Giso Berow?"
CHATTED = [{"role": "user", "content": HOME}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "What the weather is.", "parameters": SCHEMA}
KINDS = (deque(["type"]), deque(["object"]), deque(["role"]))
DRAWN = {"temperature": 1.0, "seed": 4}


LOOSER = (  # where answers differ on purpose
    # Its own examples have null where a response has not ended.
    ("Response", "allOf", 2, "properties", "usage"),
    # It has no schema of a completion's events, which begin without a reason to end.
    ("CreateCompletionResponse", "properties", "choices", "items", "properties", "finish_reason"),
    # Scores of keyword search are as large as they are; min_score means the same ones.
    ("VectorStoreSearchResultItem", "properties", "score"),
    # An empty list has no first and no last entry.
    *(
        (f"List{what}Response", "properties", end)
        for what in ("Files", "VectorStores", "VectorStoreFiles")
        for end in ("first_id", "last_id")
    ),
)


def readable(schema):
    """A schema as a validator reads it: ``nullable`` said in other words, one of several kinds.

    What has a discriminator is of the kind that it says, and may fit looser ones, too.
    """
    if isinstance(schema, list):
        return [readable(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: readable(one) for name, one in schema.items()}
    if "discriminator" in found and "oneOf" in found:
        found["anyOf"] = found.pop("oneOf")
    return {"anyOf": [found, {"type": "null"}]} if found.pop("nullable", None) is True else found


def foreign(told):
    """What a client of OpenAI's sees: all but the account that is jaxrag's own."""
    if isinstance(told, list):
        return [foreign(one) for one in told]
    if not isinstance(told, dict):
        return told
    return {name: foreign(one) for name, one in told.items() if name != OWN}


def why(error):
    """What is wrong, of several kinds of thing in that which it says it is."""
    kinds = {}
    for one in error.context or ():
        kinds.setdefault(one.schema_path[0], []).append(one)
    if not kinds:
        return [f"{error.json_path}: {error.message[:300]}"]
    meant = [it for it in kinds.values() if not any(one.relative_path in KINDS for one in it)]
    return [
        line for it in [min(meant or kinds.values(), key=len)] for one in it for line in why(one)
    ]


class Description:
    """The published description."""

    def __init__(self, path):
        text = Path(path).read_text(encoding="utf-8")
        if path.endswith((".yaml", ".yml")):
            told = pytest.importorskip("yaml").safe_load(text)
        else:
            told = json.loads(text)
        self.paths = told["paths"]
        schemas = {name: readable(one) for name, one in told["components"]["schemas"].items()}
        for *path, last in LOOSER:
            node = functools.reduce(operator.getitem, path, schemas)
            limits = {"minimum": 0, "maximum": 1}
            found = {it: value for it, value in node[last].items() if it not in limits}
            node[last] = {"anyOf": [found, {"type": "null"}]}
        whole = DRAFT202012.create_resource({"components": {"schemas": schemas}})
        self._registry = Registry().with_resource(HERE, whole)

    def check(self, told, name):
        """It is what the schema of this name says."""
        schema = {"$ref": f"{HERE}#/components/schemas/{name}"}
        validator = jsonschema.Draft202012Validator(schema, registry=self._registry)
        wrong = [line for error in validator.iter_errors(foreign(told)) for line in why(error)]
        assert not wrong, (name, wrong, json.dumps(told)[:2000])

    def answer(self, answer, path, stream=False):
        """An answer of 200 with the body of its path; returns it, or the events of a stream."""
        assert answer.status_code == 200, answer.text
        content = self.paths[path][answer.request.method.lower()]["responses"]["200"]["content"]
        kind = "text/event-stream" if stream else "application/json"
        kind = content.get(kind) or content["application/json"]  # of completions: both are the same
        name = kind["schema"]["$ref"].rpartition("/")[2]
        if not stream:
            self.check(answer.json(), name)
            return answer.json()
        *events, done = self.events(answer, name)
        assert done is None
        return events

    def events(self, answer, name):
        """Events of a stream, each by the schema of this name; None is its end."""
        lines = [it[6:] for it in answer.text.splitlines() if it.startswith("data: ")]
        events = [None if it == "[DONE]" else json.loads(it) for it in lines]
        for event in events:
            if event is not None:
                self.check(event, name)
        return events


@pytest.fixture(scope="module")
def description():
    return Description(PATH)


class Calls:
    """Calls of a server, each answer checked."""

    def __init__(self, server, description):
        self.client, self.description = server.client, description

    def __call__(self, method, path, names=(), after="", **body):
        filled = path
        for value in names:
            head, _, rest = filled.partition("{")
            filled = head + value + rest.partition("}")[2]
        sent = {} if method in ("GET", "DELETE") else {"json": body}
        if "file" in body:
            sent = {"files": {"file": body["file"]}, "data": {"purpose": "assistants"}}
        answer = self.client.request(method, f"/v1{filled}{after}", **sent)
        return self.description.answer(answer, path, body.get("stream", False))


@pytest.fixture(scope="module")
def call(kept, description):
    return Calls(kept, description)


@pytest.fixture(scope="module")
def tools(start, tools_dir, tmp_path_factory, description):
    """Calls of a server whose model calls functions and spells any text."""
    data = tmp_path_factory.mktemp("described")
    with start(load_model(tools_dir, cache_tokens=8192), {}, data=str(data)) as server:
        yield Calls(server, description)


def test_models(call):
    listed = call("GET", "/models")
    call("GET", "/models/{model}", [listed["data"][0]["id"]])


def test_files_and_vector_stores(call):
    file = call("POST", "/files", file=("story.txt", STORY))["id"]
    call("GET", "/files")
    call("GET", "/files/{file_id}", [file])
    made = call(
        "POST", "/vector_stores", name="notes", metadata={"a": "b"}, file_ids=[file],
        expires_after={"anchor": "last_active_at", "days": 7},
    )  # fmt: skip
    store = made["id"]
    assert made["expires_after"]["days"] == 7
    call("POST", STORE, [store], name="others", expires_after=None)
    call("GET", "/vector_stores")
    call("GET", STORE, [store])
    call("POST", f"{STORE}/files", [store], file_id=file, attributes={"year": 2020, "good": True})
    bad = call("POST", "/files", file=("torn.pdf", b"%PDF-1.7\nnothing of it"))["id"]
    batch = call("POST", f"{STORE}/file_batches", [store], file_ids=[file, bad, "file-0"])["id"]
    while call("GET", BATCH, [store, batch])["status"] == "in_progress":
        pass
    listed = call("GET", f"{BATCH}/files", [store, batch], after="?limit=2")
    assert listed["has_more"]
    call("POST", f"{BATCH}/cancel", [store, batch])
    call("GET", f"{STORE}/files", [store])
    call("GET", MEMBER, [store, file])
    call("GET", MEMBER, [store, bad])
    call("GET", f"{MEMBER}/content", [store, file])
    found = call("POST", f"{STORE}/search", [store], query=HOME)
    assert found["data"]
    call("POST", f"{STORE}/search", [store], query=[HOME, "Giso"], max_num_results=1)
    call("POST", MEMBER, [store, file], attributes={"year": 2021})
    call("DELETE", MEMBER, [store, file])
    call("DELETE", STORE, [store])
    call("DELETE", "/files/{file_id}", [file])


def test_empty_lists(call):
    call("GET", "/files", after="?purpose=none")
    store = call("POST", "/vector_stores")["id"]
    call("GET", f"{STORE}/files", [store])
    assert call("POST", f"{STORE}/search", [store], query=HOME)["data"] == []


def test_lists_of_what_is_served(call):
    call("GET", STORE, ["village"])
    listed = call("GET", f"{STORE}/files", ["village"])
    call("GET", MEMBER, ["village", listed["data"][0]["id"]])
    call("GET", f"{MEMBER}/content", ["village", listed["data"][0]["id"]])
    call("POST", f"{STORE}/search", ["village"], query="Kora Felell", search_mode="bm25")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"model": "synthetic@village", "k": 2},
        {"n": 2, "logprobs": True, "top_logprobs": 2, **DRAWN},
        {"max_tokens": 1, "ignore_eos": True},
        {"model": "synthetic@village", "cite": "spans"},
    ],
    ids=["plain", "base", "several", "cut", "cited"],
)
def test_chats(call, fields, stream):
    fields = {"model": "synthetic", "messages": CHATTED, **fields}
    call("POST", "/chat/completions", stream=stream, **fields)
    if stream:
        options = {"include_usage": True}
        call("POST", "/chat/completions", stream=True, stream_options=options, **fields)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}, {"prompt": ["Giso", "Kora"]}])
def test_completions(call, fields, stream):
    fields = {"model": "synthetic", "prompt": "Giso Berow", "max_tokens": 3, **fields}
    call("POST", "/completions", stream=stream, **fields)


@pytest.mark.parametrize("stream", [False, True])
def test_responses(call, stream):
    def respond(**fields):
        told = call("POST", "/responses", model="synthetic", input=HOME, stream=stream, **fields)
        return told[-1]["response"] if stream else told

    tool = {"type": "file_search", "vector_store_ids": ["village"], "max_num_results": 2}
    respond(store=False, metadata={"a": "b"})
    respond(tools=[tool], tool_choice="required")
    respond(
        tools=[tool], include=["file_search_call.results", "message.output_text.logprobs"],
        top_logprobs=2, instructions="Answer.",
    )  # fmt: skip
    respond(max_output_tokens=1, ignore_eos=True)
    first = respond(tools=[tool])["id"]
    second = respond(tools=[tool], previous_response_id=first)["id"]
    call("GET", "/responses/{response_id}", [second])
    call("GET", "/responses/{response_id}/input_items", [second])
    gone = call.client.delete(f"/v1/responses/{first}")
    assert gone.json() == {"id": first, "object": "response", "deleted": True}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "name": "weather"}])
def test_functions_of_responses(tools, choice, stream):
    tool = {"type": "function", "strict": True, **FUNCTION}
    asked = {"model": "synthetic", "tools": [tool], "tool_choice": choice, **DRAWN}
    told = tools(
        "POST", "/responses", input="Is it warm?", stream=stream, max_output_tokens=60, **asked
    )
    told = told[-1]["response"] if stream else told
    if choice == "auto":
        return
    assert {it["type"] for it in told["output"]} == {"function_call"}
    said = {"type": "function_call_output", "output": "warm"}
    results = [said | {"call_id": it["call_id"]} for it in told["output"]]
    more = tools(
        "POST", "/responses", input=results, previous_response_id=told["id"],
        max_output_tokens=5, **asked | {"tool_choice": "none"},
    )  # fmt: skip
    tools("GET", "/responses/{response_id}", [more["id"]])
    tools("GET", "/responses/{response_id}/input_items", [more["id"]])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_tools_of_chats(tools, choice, stream):
    asked = {"model": "synthetic", "tools": [{"type": "function", "function": FUNCTION}]}
    told = tools(
        "POST", "/chat/completions", messages=CHATTED, tool_choice=choice, stream=stream,
        max_tokens=150, **asked, **DRAWN,
    )  # fmt: skip
    if choice == "required" and not stream:
        calls = told["choices"][0]["message"]["tool_calls"]
        assert {it["function"]["name"] for it in calls} == {"weather"}


@pytest.mark.parametrize("stream", [False, True])
def test_forms(tools, stream):
    form = {"name": "city", "schema": SCHEMA, "strict": True}
    tools(
        "POST", "/chat/completions", model="synthetic", messages=CHATTED, stream=stream,
        response_format={"type": "json_schema", "json_schema": form}, max_tokens=150, **DRAWN,
    )  # fmt: skip
    for said in ({"type": "json_schema", **form}, {"type": "json_object"}, {"type": "text"}):
        tools(
            "POST", "/responses", model="synthetic", input=HOME, stream=stream,
            text={"format": said}, max_output_tokens=30, **DRAWN,
        )  # fmt: skip


def test_a_stream_that_fails(call, kept, held):
    """Its document leaves while it is answered."""
    made = call("POST", "/vector_stores")["id"]
    file = call("POST", "/files", file=("story.txt", STORY))["id"]
    call("POST", f"{STORE}/files", [made], file_id=file)
    while call("GET", MEMBER, [made, file])["status"] == "in_progress":
        pass
    tool = {"type": "file_search", "vector_store_ids": [made]}
    body = {"model": "synthetic", "input": HOME, "tools": [tool], "stream": True}
    with ThreadPoolExecutor() as threads, held(kept.state):
        asked = threads.submit(call.client.post, "/v1/responses", json=body)
        while not any(it.prompt_tokens for it in list(kept.state.asking)):
            time.sleep(0.01)
        call("DELETE", MEMBER, [made, file])
    *events, last = call.description.events(asked.result(), "ResponseStreamEvent")
    assert (last["type"], last["code"]) == ("error", "document_removed")
    assert last["error"]["message"] == last["message"]
    assert [it["sequence_number"] for it in [*events, last]] == list(range(len(events) + 1))


def test_embeddings(start, served_model, description, tmp_path):
    def letters(texts, kind="passage"):
        return np.array([[float(text.count(it)) for it in "abc"] for text in texts], np.float32)

    with KnowledgeBase.open(
        tmp_path / "kb", served_model, embedder=letters, index="exact", chunk_tokens=20
    ) as base:

        def change(state):
            state.knowledge_bases["letters"] = base

        with start(served_model, {}, change) as server:
            asked = {"model": "synthetic@letters", "input": ["a", "b"], "encoding_format": "float"}
            Calls(server, description)("POST", "/embeddings", **asked)


def test_what_is_wrong_is_noticed(call):
    told = call("POST", "/responses", model="synthetic", input=HOME)
    wrong = {"status": "done", "output": [{**told["output"][0], "role": "user"}], "tools": None}
    for name, value in wrong.items():
        with pytest.raises(AssertionError, match=name):
            call.description.check(told | {name: value}, "Response")
    with pytest.raises(AssertionError):
        event = {"type": "response.output_text.delta", "sequence_number": 0, "delta": "a"}
        call.description.check(event, "ResponseStreamEvent")


def test_errors(call, description):
    wrong = {"messages": CHATTED, "temperature": "warm"}
    for answer in (
        call.client.post("/v1/chat/completions", json=wrong),
        call.client.get("/v1/files/file-0"),
        call.client.get("/v1/responses/resp_0"),
        call.client.post("/v1/vector_stores/vs_0/search", json={"query": "a"}),
    ):
        assert answer.status_code in (400, 404)
        description.check(answer.json(), "ErrorResponse")
