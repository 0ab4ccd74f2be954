"""Citations over HTTP, as OpenAI's own client and LangChain read them."""

import httpx
from langchain_openai import ChatOpenAI

ANIMAL = "Which animal does Radia Dalell keep?"
HOME = "What is the home of Giso Berow?"
MODEL, KB = "synthetic", "synthetic@village"
SPANS, MARKS = {"cite": "spans"}, {"cite": "marks"}
VILLAGE = {"type": "file_search", "vector_store_ids": ["village"]}


def asked(client, **more):
    return client.chat.completions.create(
        model=KB, messages=[{"role": "user", "content": ANIMAL}], **more
    )


def test_a_chat_cites(client):
    assert asked(client).choices[0].message.annotations == []
    told = asked(client, extra_body=SPANS)
    message = told.choices[0].message
    [one] = message.annotations
    assert one.type == "url_citation"
    cited = one.url_citation
    assert message.content[cited.start_index : cited.end_index] == "rabbit"
    [told_of] = told.model_extra["jaxrag"]["citations"]
    source = told_of["source"]
    assert cited.url == f"#source-{source}" and cited.title.endswith(".txt")
    [passage] = [it for it in told.model_extra["jaxrag"]["sources"] if it["number"] == source]
    assert passage["file"] == cited.title


def test_marks_are_in_the_text(client):
    told = asked(client, extra_body=MARKS)
    [one] = told.model_extra["jaxrag"]["citations"]
    assert told.choices[0].message.content == f"rabbit [{one['source']}]"


def test_a_stream_cites_before_its_end(client):
    marks = list(asked(client, stream=True, extra_body=MARKS))
    said = "".join(it.choices[0].delta.content or "" for it in marks if it.choices)
    assert said.startswith("rabbit [")
    events = list(asked(client, stream=True, extra_body=SPANS))
    text = "".join(it.choices[0].delta.content or "" for it in events if it.choices)
    found = [it.choices[0] for it in events if it.choices and it.choices[0].delta.model_extra]
    [[one]] = [it.delta.model_extra["annotations"] for it in found]
    assert text[one["url_citation"]["start_index"] : one["url_citation"]["end_index"]] == "rabbit"
    assert found[0].finish_reason is None and events[-1].choices[0].finish_reason == "stop"


def test_every_choice_has_its_own(client):
    told = asked(client, n=2, temperature=1.0, seed=3, extra_body=SPANS)
    for choice in told.choices:
        for it in choice.message.annotations:
            cited = it.url_citation
            assert choice.message.content[cited.start_index : cited.end_index].strip()


def test_an_upload_is_cited_by_where_it_is_read(client):
    store = client.vector_stores.create(name="cited")
    file = client.vector_stores.files.upload_and_poll(
        vector_store_id=store.id,
        file=("story.txt", b"Giso Berow lives in Tondorf.\n\nMela Forow works as a judge.\n"),
    )
    told = client.chat.completions.create(
        model=f"{MODEL}@{store.id}", messages=[{"role": "user", "content": HOME}], extra_body=SPANS
    )
    [one] = told.choices[0].message.annotations
    assert (one.url_citation.title, one.url_citation.url) == (
        "story.txt",
        f"/v1/files/{file.id}/content",
    )
    assert b"Tondorf" in client.files.content(file.id).read()


def test_a_response_cites_what_was_measured(client):
    made = {"model": MODEL, "input": ANIMAL, "tools": [VILLAGE]}
    told = client.responses.create(**made, extra_body=SPANS)
    part = told.output[-1].content[0]
    [one] = part.annotations
    assert one.type == "file_citation" and one.filename.endswith(".txt")
    start, end = (one.model_extra[f"{name}_index"] for name in ("start", "end"))
    assert part.text[start:end] == "rabbit"
    with client.responses.stream(**made, extra_body=SPANS) as stream:
        added = [it for it in stream if it.type == "response.output_text.annotation.added"]
        last = stream.get_final_response()
    assert len(added) == 1 and last.output[-1].content[0].annotations == part.annotations
    read = client.responses.create(**made).output[-1].content[0].annotations
    assert len(read) >= 1 and "start_index" not in (read[0].model_extra or {})


def test_langchain_has_the_passage(kept):
    with httpx.Client() as http:
        made = ChatOpenAI(
            model=MODEL, base_url=f"{kept.url}/v1", api_key="any", max_retries=0,
            use_responses_api=True, http_client=http, extra_body=SPANS,
        ).bind_tools([VILLAGE])  # fmt: skip
        told = made.invoke(ANIMAL)
    [one] = told.content[-1]["annotations"]
    start, end = (one.get("extras", one)[f"{name}_index"] for name in ("start", "end"))
    assert told.text[start:end] == "rabbit"
