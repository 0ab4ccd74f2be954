"""Answers of a form, as stock clients ask for them."""

import concurrent.futures
import json
import re
import time

import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field

from jaxrag.models.model import load_model

CHAT = "/v1/chat/completions"
ASKED = [{"role": "user", "content": "Who is it?"}]
DRAWN = {"temperature": 1.0, "seed": 3, "max_tokens": 200}


class Person(BaseModel):
    """What is asked for."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=10)
    age: int = Field(ge=0, le=120)
    tags: list[str] = Field(max_length=2, json_schema_extra={"items": {"enum": ["a", "b"]}})


@pytest.fixture(scope="module")
def serving(start, chat_model_dir):
    with start(load_model(chat_model_dir, cache_tokens=8192), {}, warm_up=False) as running:
        yield running


@pytest.fixture(scope="module")
def client(serving):
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="any", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def name(client):
    return client.models.list().data[0].id


def text_of(answer):
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"]


def test_openai_parses_what_it_asked_for(client, name):
    told = client.chat.completions.parse(
        model=name, messages=ASKED, response_format=Person, **DRAWN
    )
    assert isinstance(told.choices[0].message.parsed, Person)
    with client.chat.completions.stream(
        model=name, messages=ASKED, response_format=Person, **DRAWN
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion().choices[0].message
    assert final.parsed == told.choices[0].message.parsed


def test_openai_parses_responses(client, name):
    told = client.responses.parse(
        model=name, input="Who is it?", text_format=Person, temperature=1.0,
        max_output_tokens=200, extra_body={"seed": 3},
    )  # fmt: skip
    assert isinstance(told.output_parsed, Person)
    assert told.text.format.type == "json_schema" and told.text.format.name == "Person"


def test_langchain_takes_structured_output(serving, name):
    chat = ChatOpenAI(
        base_url=f"{serving.url}/v1", api_key="any", model=name, max_retries=0, temperature=1.0,
        seed=3, max_tokens=200,
    )  # fmt: skip
    asked = chat.with_structured_output(Person, method="json_schema")
    assert isinstance(asked.invoke("Who is it?"), Person)
    assert isinstance(chat.with_structured_output(Person.model_json_schema(), method="json_schema",
                      strict=True).invoke("Who?"), dict)  # fmt: skip


def test_choices_of_a_request_are_each_of_the_form(client, name):
    told = client.chat.completions.create(
        model=name, messages=ASKED, n=3, extra_body={"guided_regex": "[a-z]{2,5}-[0-9]{3}"},
        **DRAWN,
    )  # fmt: skip
    found = [it.message.content for it in told.choices]
    assert all(re.fullmatch("[a-z]{2,5}-[0-9]{3}", it) for it in found) and len(set(found)) > 1


@pytest.mark.parametrize(
    "body",
    [
        {"guided_choice": ["yes", "no"]},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"guided_json": {"enum": ["yes", "no"]}},
        {"guided_json": '{"enum": ["yes", "no"]}'},
        {"structured_outputs": {"regex": "yes|no"}},
    ],
    ids=json.dumps,
)
def test_vllms_words_are_read(serving, body):
    text = text_of(serving.post(CHAT, messages=ASKED, **body, **DRAWN))
    assert text.strip('"') in ("yes", "no")


def test_an_object_of_any_kind(serving):
    answer = serving.post(
        CHAT, messages=ASKED, response_format={"type": "json_object"}, max_tokens=200, stop=["}"],
        temperature=1.0, seed=1, logprobs=True,
    ).json()  # fmt: skip
    [choice] = answer["choices"]
    text = choice["message"]["content"]
    assert text.startswith("{")
    if choice["finish_reason"] == "stop":  # a form is never cut by stop
        assert isinstance(json.loads(text), dict)
    assert any(it.startswith("stop: not looked for") for it in answer["jaxrag"]["notes"])
    assert answer["choices"][0]["logprobs"]["content"][0]["token"].startswith("{")


def test_prompts_are_gone_on_from_in_the_form(client, name):
    told = client.completions.create(
        model=name, prompt=["One", "Two"], max_tokens=20, extra_body={"guided_regex": "[0-9]{3}"}
    )
    assert all(re.fullmatch("[0-9]{3}", it.text) for it in told.choices)


HOSTILE = {
    "deep": {"guided_json": json.loads('{"properties": {"a": ' * 60 + "{}" + "}}" * 60)},
    "wide": {"guided_json": {"properties": {f"p{i}": {"type": "string"} for i in range(1500)}}},
    "cyclic": {"guided_json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    "many": {"guided_json": {"enum": [f"{i:06}" for i in range(6000)]}},
    "long": {"guided_regex": "((a{1,1000}){1,1000}){1,1000}b"},
    "ambiguous": {"guided_regex": "(.*a){40}(.|a|[a-z])*" * 20},
    "text": {"guided_json": {"type": "string", "minLength": 1_000_000}},
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_what_is_hostile_stops_nobody_else(serving, body):
    """It is answered or refused in one line, and others are answered meanwhile."""
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        running = threads.submit(
            serving.post, CHAT, messages=ASKED, **body, max_tokens=8, temperature=1.0
        )
        ended = time.monotonic() + 120
        while True:
            assert serving.post(CHAT, messages=ASKED, max_tokens=2).status_code == 200
            if running.done() or time.monotonic() > ended:
                break
        answer = running.result()
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code != 200:
        assert "\n" not in answer.json()["error"]["message"]


REFUSED = {
    "deep": {"guided_json": json.loads('{"properties": {"a": ' * 64 + "{}" + "}}" * 64)},
    "false": {"guided_json": "false"},
    "many": {
        "guided_json": {
            "anyOf": [{"type": "object", "properties": {"a": {"const": it}}} for it in range(900)]
        }
    },
    "itself": {"guided_json": {"$ref": "#"}},
}


def optional(count, name="p"):
    return {"properties": {f"{name}{it}": {} for it in range(count)}}


@pytest.mark.parametrize(
    ("schema", "wide"),
    [
        (optional(1001), 1001),
        ({"anyOf": [optional(100, name) for name in "abcdefghij"]}, 1020),
        ({"$defs": {"a": optional(1)}, "oneOf": [{"$ref": "#/$defs/a"}] * 500}, 1001),
        ({"items": {"anyOf": [{"required": ["p0"], **optional(1)}] * 501}}, 1002),
        ({**optional(1200), "required": ["p0"] * 900}, 1199),
    ],
)
def test_what_is_too_wide_is_refused_before_it_is_compiled(serving, schema, wide, monkeypatch):
    """Its tokens would be followed with Python's lock held, each for up to a second."""
    monkeypatch.setattr("llguidance.LLMatcher.grammar_from_json_schema", None)
    answer = serving.post(CHAT, messages=ASKED, guided_json=schema)
    assert answer.status_code == 400, answer.text
    assert f"it has {wide} properties that may be left out" in answer.json()["error"]["message"]


def test_what_is_required_is_not_wide(serving):
    schema = {**optional(900), "required": [f"p{it}" for it in range(900)]}
    schema["properties"] = {key: {"const": 1} for key in schema["properties"]}
    told = serving.post(CHAT, messages=ASKED, guided_json=schema, max_tokens=2)
    assert told.status_code == 200, told.text


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED)
def test_what_no_answer_can_be_is_400_at_once(serving, body):
    begun = time.monotonic()
    answer = serving.post(CHAT, messages=ASKED, **body, max_tokens=8)
    assert answer.status_code == 400 and time.monotonic() - begun < 10, answer.text  # 2 alone
    error = answer.json()["error"]
    assert "\n" not in error["message"] and error["param"] == "response_format"


def test_what_is_not_held_to_is_noted(serving):
    schema = {"type": "string", "format": "password", "maxLength": 3}
    answer = serving.post(CHAT, messages=ASKED, guided_json=schema, **DRAWN).json()
    assert any("Unknown format: password" in it for it in answer["jaxrag"]["notes"])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"guided_choice": ["<|im_end|> is a marker"]}, "<|im_end|> is a marker"),
        ({"guided_json": {"enum": ["<|im_start|>x"]}}, '"<|im_start|>x"'),
    ],
)
def test_a_form_that_spells_a_special_token_is_answered(serving, form, text):
    answer = serving.post(CHAT, messages=ASKED, **form, **DRAWN).json()
    assert text_of_choice(answer) == (text, "stop")


def text_of_choice(answer):
    [choice] = answer["choices"]
    return choice["message"]["content"], choice["finish_reason"]


def test_words_are_looked_for_within_a_form(serving):
    form = {"guided_choice": ["a", "b"], "messages": ASKED}
    one = text_of(serving.post(CHAT, **form))
    other = text_of(serving.post(CHAT, bad_words=[one], **form))
    assert {one, other} == {"a", "b"}
    assert text_of(serving.post(CHAT, bad_words=["a", "b"], **form)) == one, "the form comes first"
