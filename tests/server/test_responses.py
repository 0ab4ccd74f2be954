"""/v1/responses by OpenAI's own client: its types, its events in order, its search of files."""

import json

import httpx
import openai
import pytest
from langchain_openai import ChatOpenAI
from openai.types.responses import Response
from serving import key_file

from jaxrag.server.answers.asking import Asking
from jaxrag.server.errors import unavailable

STORY = b"File 23: Giso Berow lives in Tondorf.\n\nFile 18: Mela Forow works as a judge.\n"
HOME = "What is the home of Giso Berow?"
ANIMAL = "Which animal does Kora Felell keep?"
ASKED = [{"role": "user", "content": HOME}]
MODEL, KB = "synthetic", "synthetic@village"
VILLAGE = {"type": "file_search", "vector_store_ids": ["village"]}


@pytest.fixture(scope="module")
def store(client):
    """A vector store with two files, of which one is of 2020."""
    made = client.vector_stores.create(name="notes")
    for name, text, year in (("story.txt", STORY, 2020), ("old.txt", b"Kora Felell.", 1990)):
        file = client.vector_stores.files.upload_and_poll(
            vector_store_id=made.id, file=(name, text), attributes={"year": year}
        )
        assert file.status == "completed"
    return made.id


def strict(told):
    """The response by the client's own types, every field of a type that it has."""
    return Response.model_validate(told.to_dict(), strict=False)


def test_a_search_finds_and_cites(client, store):
    tool = {"type": "file_search", "vector_store_ids": [store], "max_num_results": 2}
    told = client.responses.create(model=MODEL, input=HOME, tools=[tool], store=False)
    assert strict(told).output_text == told.output_text == "Tondorf"
    assert (told.status, told.store, told.model) == ("completed", False, f"{MODEL}@{store}")
    search, message = told.output
    assert (search.type, search.status, search.queries) == ("file_search_call", "completed", [HOME])
    assert search.results is None
    first = message.content[0].annotations[0]
    assert (first.type, first.filename, first.index) == ("file_citation", "story.txt", 0)
    assert client.files.retrieve(first.file_id).filename == "story.txt"
    usage = told.usage
    assert usage.input_tokens + usage.output_tokens == usage.total_tokens
    again = client.responses.create(model=MODEL, input=HOME, tools=[tool]).usage
    assert 0 < again.input_tokens_details.cached_tokens < again.input_tokens
    assert told.model_extra["jaxrag"]["counts"]["reused"] > 0


def test_results_are_told_where_they_are_asked_for(client, store):
    tool = {"type": "file_search", "vector_store_ids": [store], "max_num_results": 1}
    told = client.responses.create(
        model=MODEL, input=HOME, tools=[tool], include=["file_search_call.results"]
    )
    [found] = told.output[0].results
    assert found.filename == "story.txt" and "Giso Berow" in found.text and found.score > 0
    filters = {"type": "lt", "key": "year", "value": 2000}
    told = client.responses.create(
        model=MODEL,
        input=HOME,
        tools=[{**tool, "filters": filters}],
        include=["file_search_call.results"],
    )
    assert {it.filename for it in told.output[0].results} <= {"old.txt"}


def test_messages_and_instructions_are_a_chat(client):
    talk = [
        {"role": "user", "content": HOME},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Tondorf", "annotations": []}],
        },
        {"role": "user", "content": [{"type": "input_text", "text": ANIMAL}]},
    ]
    told = client.responses.create(
        model=MODEL, input=talk, tools=[VILLAGE], instructions="Answer the question.", temperature=0
    )
    chat = [{"role": "system", "content": "Answer the question."}]
    chat += [{"role": "user", "content": HOME}, {"role": "assistant", "content": "Tondorf"}]
    same = client.chat.completions.create(
        model=KB, messages=[*chat, {"role": "user", "content": ANIMAL}]
    )
    assert told.output_text == same.choices[0].message.content
    assert told.usage.input_tokens == same.usage.prompt_tokens
    assert told.instructions == "Answer the question."
    back = [*talk, *(it.to_dict() for it in told.output), {"role": "user", "content": ANIMAL}]
    assert client.responses.create(model=MODEL, input=back, tools=[VILLAGE]).output_text


def test_a_stream_has_typed_events_in_their_order(client):
    ask = {"model": MODEL, "input": ANIMAL, "tools": [VILLAGE]}
    include = ["message.output_text.logprobs", "file_search_call.results"]
    with client.responses.stream(**ask, include=include, top_logprobs=2) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [it.type.removeprefix("response.") for it in events]
    once = list(dict.fromkeys(it for it in kinds if "annotation" not in it))
    assert once == [
        "created",
        "in_progress",
        "output_item.added",
        "file_search_call.in_progress",
        "file_search_call.searching",
        "file_search_call.completed",
        "output_item.done",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "completed",
    ]
    assert [it.sequence_number for it in events] == list(range(len(events)))
    items = [it for it in events if it.type.startswith("response.output_item")]
    assert [(it.output_index, it.item.type) for it in items] == [
        (0, "file_search_call"),
        (0, "file_search_call"),
        (1, "message"),
        (1, "message"),
    ]
    cited = [it.annotation for it in events if "annotation" in it.type]
    part = final.output[1].content[0]
    assert len(cited) == len(part.annotations) >= 1
    assert items[1].item.results == final.output[0].results
    deltas = [it for it in events if it.type == "response.output_text.delta"]
    assert "".join(it.delta for it in deltas) == final.output_text == "falcon"
    assert len(part.logprobs[0].top_logprobs) == 2
    whole = client.responses.create(**ask, include=include, top_logprobs=2)
    assert whole.output_text == final.output_text and whole.usage == final.usage
    [same] = whole.output[1].content
    assert (same.text, same.annotations) == (part.text, part.annotations)
    assert same.logprobs == part.logprobs


def test_a_stream_that_fails_ends_with_an_error(client, kept, monkeypatch):
    """As an event of OpenAI's, which its client raises."""

    async def left(asking):
        raise unavailable("a document was removed", 1.0, "document_removed")

    monkeypatch.setattr(Asking, "check_current", left)
    body = {"model": MODEL, "input": ANIMAL, "tools": [VILLAGE], "stream": True}
    last = kept.post("/v1/responses", **body).text.strip().rpartition("\n\n")[2]
    name, data = last.split("\n")
    told = json.loads(data.removeprefix("data: "))
    assert (name, told["type"], told["code"]) == ("event: error", "error", "document_removed")
    assert told["message"] == told["error"]["message"] == "a document was removed"
    assert told["sequence_number"] > 1
    with pytest.raises(openai.APIError):
        list(client.responses.create(**body))


def test_an_answer_that_is_cut_is_incomplete(client):
    ask = {"model": MODEL, "input": ANIMAL, "tools": [VILLAGE], "max_output_tokens": 2}
    told = client.responses.create(**ask, extra_body={"ignore_eos": True})
    assert (told.status, told.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert told.output[1].status == "incomplete" and told.usage.output_tokens == 2
    *_, last = client.responses.create(**ask, extra_body={"ignore_eos": True}, stream=True)
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")


def test_without_a_search_the_model_alone_is_asked(client):
    told = client.responses.create(model=MODEL, input=ANIMAL)
    assert [it.type for it in told.output] == ["message"]
    assert told.output[0].content[0].annotations == []
    named = client.responses.create(model=KB, input=ANIMAL)
    assert named.output_text == "falcon" and [it.type for it in named.output] == ["message"]
    none = client.responses.create(model=KB, input=ANIMAL, tools=[VILLAGE], tool_choice="none")
    assert (none.output_text, none.tools) == ("falcon", [])


def test_langchain_uses_responses(kept):
    with httpx.Client() as http:
        made = ChatOpenAI(
            model=MODEL, base_url=f"{kept.url}/v1", api_key="any", max_retries=0,
            use_responses_api=True, http_client=http,
        ).bind_tools([VILLAGE])  # fmt: skip
        told = made.invoke(ANIMAL)
        pieces = list(made.stream(ANIMAL))
    assert told.text == "falcon" == "".join(it.text for it in pieces)
    assert told.content[-1]["annotations"][0]["type"] == "file_citation"
    assert told.usage_metadata["input_token_details"]["cache_read"] > 0


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": []}, "input", "a text, or a list of messages"),
        ({"input": [{"type": "image"}]}, "input", "expected a message"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input",
            "input_text",
        ),
        ({"input": [{"role": "narrator", "content": "x"}]}, "input", "one of system, user"),
        ({"background": True}, "background", "does not do that"),
        ({"text": {"format": {"type": "json_object"}}}, "response_format", "spells any text"),
        ({"text": {"format": {"type": "json_schema"}}}, "text", "a schema"),
        ({"reasoning": {"effort": "high"}}, "reasoning", "does not do that"),
        ({"include": ["reasoning.encrypted_content"]}, "include", "expected one of"),
        ({"tools": [{"type": "web_search"}]}, "tools", "expected one, file_search"),
        ({"tools": [VILLAGE, {"type": "function", "name": "f"}]}, "tools", "functions alone"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools", "need a model with a chat"),
        ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools", "one id"),
        ({"tools": [VILLAGE | {"max_num_results": 51}]}, "tools", "at most 50"),
        ({"tools": [VILLAGE | {"filters": {"type": "near"}}]}, "filters", "one of eq"),
        (
            {"tools": [VILLAGE | {"ranking_options": {"hybrid_search": {"text_weight": 1}}}]},
            "tools",
            "leave it out",
        ),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"model": "synthetic@other", "tools": [VILLAGE]}, "tools", "name one"),
        ({"metadata": {"a": [1]}}, "metadata", "a name of at most"),
        ({"top_logprobs": 21}, "top_logprobs", "at most 20"),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else None,
)
def test_what_is_not_done_is_refused_by_name(kept, fields, param, words):
    answer = kept.post("/v1/responses", **{"input": ANIMAL} | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert words in error["message"] and "\n" not in error["message"]


def test_a_response_is_kept_and_goes_on(client, kept):
    first = client.responses.create(model=MODEL, input=HOME, tools=[VILLAGE], metadata={"a": "b"})
    assert first.store
    assert client.responses.retrieve(first.id).output == first.output
    ask = {"model": MODEL, "input": ANIMAL, "tools": [VILLAGE]}
    second = client.responses.create(**ask, previous_response_id=first.id)
    assert second.previous_response_id == first.id
    talk = [
        {"role": "user", "content": HOME},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": ANIMAL},
    ]
    same = client.responses.create(**{**ask, "input": talk}, store=False)
    assert same.output_text == second.output_text
    assert same.usage.input_tokens == second.usage.input_tokens
    *_, last = client.responses.create(**ask, previous_response_id=second.id, stream=True)
    assert client.responses.retrieve(last.response.id).output_text == last.response.output_text
    client.responses.delete(first.id)
    for gone in (first.id, same.id):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone)
        with pytest.raises(openai.NotFoundError):
            client.responses.create(**ask, previous_response_id=gone)
    assert client.responses.retrieve(second.id).id == second.id


def test_an_item_is_referred_to(client, kept):
    ask = {"model": MODEL, "tools": [VILLAGE]}
    first = client.responses.create(**ask, input=HOME)
    refs = [{"type": "item_reference", "id": it.id} for it in first.output]
    assert len(refs) == 2, "a search and a message"

    def told(*before):
        talk = [{"role": "user", "content": HOME}, *before, {"role": "user", "content": ANIMAL}]
        found = client.responses.create(**ask, input=talk, store=False)
        return found.output_text, found.usage.input_tokens

    assert told(*refs) == told(*[it.to_dict() for it in first.output]) != told()
    client.responses.delete(first.id)
    for name in (first.output[-1].id, "msg_1", "msg_" + "0" * 32):
        answer = kept.post("/v1/responses", input=[{"type": "item_reference", "id": name}])
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (404, "input")
        assert name in error["message"] and "\n" not in error["message"]
    wrong = kept.post("/v1/responses", input=[{"type": "item_reference", "id": 7}])
    assert wrong.status_code == 400 and "input[0].id=7" in wrong.json()["error"]["message"]


def test_no_answer_outlives_its_documents(client, kept):
    """Law 18: what was made from a removed file is forgotten, with all that went on from it."""
    made = client.vector_stores.create(name="short")
    files = [
        client.vector_stores.files.upload_and_poll(vector_store_id=made.id, file=(name, text))
        for name, text in (("a.txt", STORY), ("b.txt", b"Kora Felell keeps a falcon."))
    ]
    tool = {"type": "file_search", "vector_store_ids": [made.id], "max_num_results": 1}
    ask = {"model": MODEL, "tools": [tool], "include": ["file_search_call.results"]}
    quoting = client.responses.create(input=HOME, **ask)
    other = client.responses.create(input=ANIMAL, **ask)
    after = client.responses.create(input=ANIMAL, previous_response_id=quoting.id, **ask)
    said = {"type": "item_reference", "id": quoting.output[-1].id}
    referring = client.responses.create(
        input=[{"role": "user", "content": HOME}, said, {"role": "user", "content": ANIMAL}], **ask
    )
    rows = {it.id: it for it in kept.state.library.registry.responses()}
    assert "lives in Tondorf" not in json.dumps(rows[quoting.id].body), "no passage is kept"
    client.vector_stores.files.delete(files[0].id, vector_store_id=made.id)
    left = {it.id for it in kept.state.library.registry.responses()}
    assert other.id in left and not left & {quoting.id, after.id, referring.id}
    client.vector_stores.delete(made.id)
    for gone in (quoting, after, other):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone.id)


def test_a_served_document_that_left_takes_its_answers(client, kept, monkeypatch):
    """Removed behind the server's back: seen when the response is asked for."""
    told = client.responses.create(model=MODEL, input=ANIMAL, tools=[VILLAGE])
    base = kept.state.knowledge_bases["village"]
    monkeypatch.setattr(type(base), "holds", lambda self, chunks, contents: False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(told.id)
    monkeypatch.undo()
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(told.id)


def test_responses_are_kept_for_a_while(client, kept):
    told = client.responses.create(model=MODEL, input=ANIMAL, tools=[VILLAGE])
    library, registry = kept.state.library, kept.state.library.registry
    before = registry.bytes_of_tenant("")
    with registry._change() as connection:
        connection.execute("UPDATE responses SET created = 1 WHERE id = ?", (told.id,))
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(told.id)
    library._keep_once(0.0)
    assert told.id not in {it.id for it in registry.responses()}
    assert registry.bytes_of_tenant("") < before, "they count as what the tenant stores"


def test_responses_outlive_the_server_and_are_their_tenants(running, served_model, tmp_path):
    keys = {"1": 'tenant = "a"', "2": 'tenant = "a"\ndocuments = "read"', "3": 'tenant = "b"'}
    most = "[tenants.a]\nmax_bytes = 9999\n[tenants.b]\nmax_bytes = 1"
    keys = key_file(tmp_path / "keys.toml", keys, most)
    settings = {"data": str(tmp_path / "data"), "keys": keys}

    def asked(server, key, **fields):
        head = {"authorization": f"Bearer {key}"}
        return server.client.post("/v1/responses", json={"input": HOME} | fields, headers=head)

    with running(served_model, {}, **settings) as server:
        told = asked(server, "1").json()
        reading, full = asked(server, "2").json(), asked(server, "3")
        assert (told["store"], reading["store"]) == (True, False)
        assert full.status_code == 413 and asked(server, "3", store=False).status_code == 200
        goes_on = asked(server, "2", previous_response_id=told["id"])
        assert goes_on.json()["error"]["param"] == "previous_response_id"
        registry = server.state.library.registry
        registry.add_response("resp_b", "b", {"response": {}, "messages": []}, [])
    with running(served_model, {}, **settings) as server:
        assert asked(server, "1", previous_response_id=told["id"]).status_code == 200
        assert asked(server, "1", previous_response_id="resp_b").status_code == 404
        said = [{"type": "item_reference", "id": told["output"][-1]["id"]}, *ASKED]
        assert asked(server, "1", input=said).status_code == 200
        assert [asked(server, it, input=said, store=False).status_code for it in "23"] == [404] * 2


def test_without_a_data_folder_nothing_is_kept(server):
    told = server.post("/v1/responses", input=ANIMAL, model=KB, store=True).json()
    assert told["store"] is False
    assert server.client.get(f"/v1/responses/{told['id']}").status_code == 404
    error = server.post("/v1/responses", input=ANIMAL, previous_response_id=told["id"]).json()
    assert "--data DIR" in error["error"]["message"]


def test_a_store_that_is_not_there_is_404(client):
    with pytest.raises(openai.NotFoundError):
        client.responses.create(
            model=MODEL, input=HOME, tools=[{"type": "file_search", "vector_store_ids": ["vs_0"]}]
        )


def test_a_removed_response_leaves_no_word_on_the_disk(start, served_model, tmp_path):
    with start(served_model, {}, data=str(tmp_path)) as server:
        asked = server.post("/v1/responses", input=HOME)
        made = asked.raise_for_status().json()["id"]
        assert server.client.delete(f"/v1/responses/{made}").status_code == 200
        files = list(tmp_path.rglob("server.sqlite*"))
        assert files and not any(b"Giso Berow" in it.read_bytes() for it in files)
