"""/v1/responses by OpenAI's own client: its types, its events in order, its search of files."""

import json

import httpx
import openai
import pytest
from langchain_openai import ChatOpenAI
from openai.types.responses import Response

STORY = b"File 23: Giso Berow lives in Tondorf.\n\nFile 18: Mela Forow works as a judge.\n"
HOME = "What is the home of Giso Berow?"
ANIMAL = "Which animal does Kora Felell keep?"
MODEL, KB = "synthetic", "synthetic@village"
VILLAGE = {"type": "file_search", "vector_store_ids": ["village"]}


@pytest.fixture(scope="module")
def kept(running, served_model, village, tmp_path_factory):
    """A server with a data folder."""
    data = tmp_path_factory.mktemp("data")
    with running(served_model, {"village": village}, data=str(data)) as started:
        yield started


@pytest.fixture(scope="module")
def client(kept):
    with openai.OpenAI(base_url=f"{kept.url}/v1", api_key="any", max_retries=0) as made:
        yield made


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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": []}, "input", "a text, or a list of messages"),
        ({"input": [{"type": "function_call_output"}]}, "input", "expected a message"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input",
            "input_text",
        ),
        ({"input": [{"role": "narrator", "content": "x"}]}, "input", "one of system, user"),
        ({"background": True}, "background", "does not do that"),
        ({"conversation": "c"}, "conversation", "does not do that"),
        ({"truncation": "auto"}, "truncation", "does not do that"),
        ({"text": {"format": {"type": "json_object"}}}, "text", "does not do that"),
        ({"reasoning": {"effort": "high"}}, "reasoning", "does not do that"),
        ({"include": ["reasoning.encrypted_content"]}, "include", "expected some of"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools", "expected one, file_search"),
        ({"tools": [VILLAGE, VILLAGE]}, "tools", "expected one, file_search"),
        ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools", "one id"),
        ({"tools": [VILLAGE | {"max_num_results": 51}]}, "max_num_results", "1 to 50"),
        ({"tools": [VILLAGE | {"filters": {"type": "near"}}]}, "filters", "one of eq"),
        (
            {"tools": [VILLAGE | {"ranking_options": {"hybrid_search": {"text_weight": 1}}}]},
            "tools",
            "leave it out",
        ),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"model": "synthetic@other", "tools": [VILLAGE]}, "tools", "name one"),
        ({"metadata": {"a": [1]}}, "metadata", "a name of at most"),
        ({"temperature": -1}, "temperature", "0 (greedy)"),
        ({"n": 2}, "n", "does not do that"),
        ({"top_logprobs": 21}, "top_logprobs", "0 to 20"),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else None,
)
def test_what_is_not_done_is_refused_by_name(kept, fields, param, words, stream):
    answer = kept.post("/v1/responses", **{"input": ANIMAL, "stream": stream} | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert words in error["message"] and "\n" not in error["message"]


def test_a_store_that_is_not_there_is_404(client):
    with pytest.raises(openai.NotFoundError):
        client.responses.create(
            model=MODEL, input=HOME, tools=[{"type": "file_search", "vector_store_ids": ["vs_0"]}]
        )
