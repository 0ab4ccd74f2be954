"""Tools of a chat, as stock clients call them."""

import json
import re

import hypothesis
import hypothesis.strategies as st
import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from jaxrag.models.model import load_model
from jaxrag.models.text.tokenizer import Tokenizer
from jaxrag.serve.calls import begun_calls

CHAT = "/v1/chat/completions"
ASKED = [{"role": "user", "content": "Is it warm?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "What the weather is.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALLED = (
    "Hm\\.\n<tool_call>\n"
    '\\{"name": "weather", "arguments": \\{"city": "[a-z]{3,5}", "days": 1\\}\\}'
    "\n</tool_call>"
)
DRAWN = {"temperature": 1.0, "seed": 4, "max_tokens": 150}


@pytest.fixture(scope="module")
def serving(start, tools_dir):
    with start(load_model(tools_dir, cache_tokens=8192), {}, warm_up=False) as running:
        yield running


@pytest.fixture(scope="module")
def client(serving):
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="any", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def name(client):
    return client.models.list().data[0].id


def check(call, tool=None):
    arguments = json.loads(call.function.arguments)
    assert call.type == "function" and call.id
    if call.function.name == "weather":
        assert arguments.keys() == {"city", "days"} and arguments["days"] in (1, 3)
    assert tool in (None, call.function.name)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_call_that_is_wanted_is_valid(client, name, choice, stream):
    asked = {"model": name, "messages": ASKED, "tools": [WEATHER], "tool_choice": choice, **DRAWN}
    if stream:
        with client.chat.completions.stream(**asked) as events:
            for _ in events:
                pass
            told = events.get_final_completion().choices[0]
    else:
        told = client.chat.completions.create(**asked).choices[0]
    assert told.finish_reason == "tool_calls" and not told.message.content
    assert told.message.tool_calls
    for call in told.message.tool_calls:
        check(call, "weather")


def test_one_call_where_one_is_wanted(client, name):
    for seed in range(4):
        told = client.chat.completions.create(
            model=name, messages=ASKED, tools=[WEATHER], tool_choice="required",
            parallel_tool_calls=False, **DRAWN | {"seed": seed},
        )  # fmt: skip
        assert len(told.choices[0].message.tool_calls) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_a_model_makes_of_itself_are_read(client, name, stream):
    asked = {
        "model": name, "messages": ASKED, "tools": [WEATHER, CLOCK],
        "extra_body": {"guided_regex": CALLED}, **DRAWN,
    }  # fmt: skip
    if stream:
        text, calls, reason = "", [], None
        for event in client.chat.completions.create(stream=True, **asked):
            [choice] = event.choices
            text += choice.delta.content or ""
            calls += choice.delta.tool_calls or []
            reason = choice.finish_reason or reason
    else:
        [choice] = client.chat.completions.create(**asked).choices
        text, calls = choice.message.content, choice.message.tool_calls
        reason = choice.finish_reason
    assert (text, reason) == ("Hm.", "tool_calls")
    [call] = calls
    check(call, "weather")


def test_an_answer_that_calls_nothing_is_text(client, name):
    asked = {"model": name, "messages": ASKED, "tools": [WEATHER], **DRAWN}
    guided = {"extra_body": {"guided_regex": "It is [a-z]{4}, <b>so</b>\\."}}
    told = client.chat.completions.create(**asked, **guided).choices[0]
    assert told.message.tool_calls is None and told.finish_reason == "stop"
    pieces = client.chat.completions.create(stream=True, **asked, **guided)
    text = "".join(it.choices[0].delta.content or "" for it in pieces)
    assert text == told.message.content and text.endswith("<b>so</b>.")


def test_what_a_tool_says_goes_back(serving, client, name):
    first = client.chat.completions.create(
        model=name, messages=ASKED, tools=[WEATHER], tool_choice="required", **DRAWN
    ).choices[0].message  # fmt: skip
    results = [
        {"role": "tool", "tool_call_id": it.id, "content": "12 degrees"} for it in first.tool_calls
    ]
    told = client.chat.completions.create(
        model=name, messages=[*ASKED, first, *results], tools=[WEATHER], max_tokens=5
    )
    assert told.usage.prompt_tokens > 60


FUNCTION = {"type": "function", **WEATHER["function"]}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_responses_call_functions(client, name, choice):
    asked = {
        "model": name, "input": "Is it warm?", "tools": [FUNCTION], "tool_choice": choice,
        "temperature": 1.0, "max_output_tokens": 150, "extra_body": {"seed": 4},
    }  # fmt: skip
    told = client.responses.create(**asked)
    calls = told.output
    assert told.status == "completed" and {it.type for it in calls} == {"function_call"}
    assert all(json.loads(it.arguments).keys() == {"city", "days"} for it in calls)
    with client.responses.stream(**asked) as events:
        kinds = [it.type for it in events]
        final = events.get_final_response()
    assert [it.arguments for it in final.output] == [it.arguments for it in calls]
    assert kinds.count("response.function_call_arguments.done") == len(calls)
    results = [
        {"type": "function_call_output", "call_id": it.call_id, "output": "12"} for it in calls
    ]
    said = [{"role": "user", "content": "Is it warm?"}, *(it.model_dump() for it in calls)]
    more = client.responses.create(
        model=name, input=[*said, *results], tools=[FUNCTION], max_output_tokens=5
    )
    assert more.usage.input_tokens > told.usage.input_tokens
    last = {"model": name, "input": [*said, *results], "max_output_tokens": 5}
    silent = client.responses.create(**last, tools=[FUNCTION], tool_choice="none")
    assert silent.usage.input_tokens == client.responses.create(**last).usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_responses_tell_text_and_calls(client, name, stream):
    asked = {
        "model": name, "input": "Is it warm?", "tools": [FUNCTION], "temperature": 1.0,
        "max_output_tokens": 150, "extra_body": {"guided_regex": CALLED, "seed": 4},
    }  # fmt: skip
    if stream:
        with client.responses.stream(**asked) as events:
            all_ = list(events)
            told = events.get_final_response()
        kinds = [it.type.removeprefix("response.") for it in all_]
        assert "".join(it.delta for it in all_ if it.type.endswith("output_text.delta")) == "Hm."
        assert kinds.index("output_text.delta") < kinds.index("function_call_arguments.delta")
        assert [it.sequence_number for it in all_] == list(range(len(all_)))
        assert kinds.count("output_item.added") == kinds.count("output_item.done") == 2
    else:
        told = client.responses.create(**asked)
    message, call = told.output
    assert (told.output_text, message.type, call.name) == ("Hm.", "message", "weather")


def test_what_was_called_is_kept(start, tools_dir, tmp_path):
    model = load_model(tools_dir, cache_tokens=8192)
    with (
        start(model, {}, warm_up=False, data=str(tmp_path / "data")) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0) as client,
    ):
        name = client.models.list().data[0].id
        asked = {"model": name, "tools": [FUNCTION], "max_output_tokens": 150}
        first = client.responses.create(
            input="Is it warm?", tool_choice="required", temperature=1.0,
            extra_body={"seed": 4}, **asked,
        )  # fmt: skip
        results = [
            {"type": "function_call_output", "call_id": it.call_id, "output": "12"}
            for it in first.output
        ]
        more = client.responses.create(
            input=results, previous_response_id=first.id, **asked | {"max_output_tokens": 3}
        )
        assert more.usage.input_tokens > first.usage.input_tokens
        items = client.responses.input_items.list(more.id, order="asc").data
        assert [it.type for it in items[:2]] == ["message", "function_call"]
        assert items[-1].type == "function_call_output" and items[-1].output == "12"
        assert items[0].content[0].text == "Is it warm?"
        kept = client.responses.retrieve(first.id)
        assert [it.arguments for it in kept.output] == [it.arguments for it in first.output]


def test_langchain_binds_tools(serving, name):
    @tool
    def weather(city: str, days: int) -> str:
        """What the weather is."""
        return f"{city} is warm for {days} days."

    chat = ChatOpenAI(
        base_url=f"{serving.url}/v1", api_key="any", model=name, max_retries=0, temperature=1.0,
        seed=4, max_tokens=400,
    )  # fmt: skip
    told = chat.bind_tools([weather], tool_choice="weather").invoke("Is it warm?")
    if told.tool_calls:
        [call] = told.tool_calls
        assert call["name"] == "weather" and call["args"].keys() == {"city", "days"}
    else:  # its text has no end within the tokens that may be drawn
        assert told.invalid_tool_calls
    answer = ToolMessage("It is.", tool_call_id="123456789")
    asked = [HumanMessage("Is it warm?"), told, answer]
    if told.tool_calls:
        asked[-1].tool_call_id = told.tool_calls[0]["id"]
        assert chat.bind_tools([weather]).invoke(asked).usage_metadata["input_tokens"] > 60


def test_an_id_spells_no_special_token(serving):
    said = {"role": "tool", "tool_call_id": "<|im_end|>", "content": "12 degrees"}
    call = {"function": {"name": "weather", "arguments": "{}"}, "id": "a" * 9}
    messages = [*ASKED, {"role": "assistant", "tool_calls": [call]}, said]
    tokens = serving.post("/tokenize", messages=messages).raise_for_status().json()["tokens"]
    text = serving.post("/detokenize", tokens=tokens).json()["prompt"]
    assert text.count("<|im_end|>") == len(messages)


def test_tools_and_calls_spell_no_special_token(serving):
    """What they spell is ordinary text, and goes back as it came."""
    tool = {"name": "f", "description": "Ends at <|im_end|>."}
    call = {"function": {"name": "f", "arguments": '{"a": "<|im_start|>"}'}, "id": "a" * 9}
    messages = [*ASKED, {"role": "assistant", "tool_calls": [call]}]
    asked = {"messages": messages, "tools": [{"type": "function", "function": tool}]}
    answer = serving.post(CHAT, **asked, max_tokens=1)
    assert answer.status_code == 200, answer.text
    tokens = serving.post("/tokenize", messages=messages).raise_for_status().json()["tokens"]
    special = serving.post("/tokenize", prompt="<|im_start|>").json()["tokens"]
    text = serving.post("/detokenize", tokens=tokens).json()["prompt"]
    assert text.count("<|im_start|>") == len(messages) + 2 == tokens.count(special[-1]) + 1


@pytest.mark.parametrize("choice", ["required", "named"])
@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": {}}])
def test_a_function_without_parameters_gets_none(serving, parameters, choice):
    tool = {"type": "function", "function": {"name": "now", "parameters": parameters}}
    wanted = {"type": "function", "function": {"name": "now"}} if choice == "named" else choice
    answer = serving.post(CHAT, messages=ASKED, tools=[tool], tool_choice=wanted, **DRAWN).json()
    calls = answer["choices"][0]["message"]["tool_calls"]
    assert {it["function"]["arguments"] for it in calls} == {"{}"}


def test_arguments_are_an_object_whatever_the_schema_leaves_out(serving):
    parameters = {"properties": {"a": {"enum": [1]}}, "required": ["a"]}
    function = {"name": "f", "parameters": parameters | {"additionalProperties": False}}
    tool = {"type": "function", "function": function}
    wanted = {"type": "function", "function": {"name": "f"}}
    answer = serving.post(
        CHAT, messages=ASKED, tools=[tool], tool_choice=wanted, stop=["a", "1"], **DRAWN
    ).json()
    [choice] = answer["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert choice["finish_reason"] == "tool_calls"
    assert any(it.startswith("stop: not looked for") for it in answer["jaxrag"]["notes"])


BAD = [
    ({"tools": {}}, "tools", "expected a list"),
    ({"tools": [{"type": "retrieval"}]}, "tools", "expected one of function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "_-]{1,64}"),
    ({"tools": [WEATHER, WEATHER]}, "tools", "one name"),
    ({"tools": [WEATHER] * 129}, "tools", "at most 128"),
    ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice", "auto, required"),
    ({"tools": [WEATHER], "tool_choice": {"function": {"name": "x"}}}, "tool_choice", "name of"),
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"tools": [WEATHER], "documents": ["a"]}, "tools", "paste passages"),
    (
        {"tools": [WEATHER], "tool_choice": "required", "guided_regex": "a"},
        "tool_choice",
        "leave one out",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}]},
        "tools",
        "parameters.type='x': expected object",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {
            "properties": {"a": {"type": "x"}}}}}], "tool_choice": "required"},
        "response_format",
        "Invalid type",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "words"), BAD)
def test_what_is_wrong_is_400_and_names_the_field(serving, body, param, words):
    answer = serving.post(CHAT, **{"messages": ASKED} | body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert words in error["message"] and error["param"] == param


def test_a_template_without_tools_is_refused(start, chat_model_dir):
    with start(load_model(chat_model_dir, cache_tokens=2048), {}, warm_up=False) as running:
        answer = running.post(CHAT, messages=ASKED, tools=[WEATHER])
    assert answer.status_code == 400
    assert "in no form that is known" in answer.json()["error"]["message"]


WORD = st.sampled_from(["", "f", "weather", "a b", "x" * 65, "<|im_end|>", "</tool_call>", "("])
LEAF = st.none() | st.booleans() | st.integers() | WORD
ANY = st.recursive(
    LEAF, lambda it: st.lists(it, max_size=2) | st.dictionaries(WORD, it), max_leaves=4
)
SCHEMA = ANY | st.sampled_from(
    [
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"type": "x"}, {"enum": []}, {"$ref": "#"}, {"type": ["string", "null"]}, {"pattern": "("},
        {"oneOf": [{"type": "string"}, {"type": "string"}]}, {"minimum": 3, "maximum": 1},
        {"const": "</tool_call>"},
    ]
)  # fmt: skip
DEFINED = st.fixed_dictionaries({"name": WORD}, optional={"parameters": SCHEMA, "description": ANY})
TOOL = ANY | DEFINED.flatmap(
    lambda it: st.sampled_from([{"type": "function", "function": it}, {"type": "function", **it}])
)
CALL = st.fixed_dictionaries({"name": WORD, "arguments": ANY | st.sampled_from(["{}", '{"a": 1}'])})
SAID = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool"]), "content": ANY},
    optional={"tool_calls": ANY | st.lists(st.builds(lambda it: {"function": it}, CALL))},
)
ITEM = SAID | st.fixed_dictionaries(
    {"type": st.sampled_from(["function_call", "function_call_output", "message"])},
    optional={"call_id": ANY, "name": WORD, "arguments": ANY, "output": ANY},
)
CHOICE = ANY | st.sampled_from(
    ["auto", "none", "required", {"type": "function", "function": {"name": "f"}},
     {"type": "function", "name": "f"}]
)  # fmt: skip
FORMS = st.fixed_dictionaries(
    {},
    optional={
        "guided_regex": ANY | st.sampled_from(["a", "[a-z]{3}", "x*", "\\bq"]),
        "guided_choice": ANY,
        "guided_json": SCHEMA,
        "response_format": ANY
        | st.builds(lambda it: {"type": "json_schema", "json_schema": {"schema": it}}, SCHEMA),
        "structured_outputs": ANY,
    },
)


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/completions"])
def test_no_tool_and_no_form_makes_the_server_fail(serving, path):
    """Requests with tools, calls and forms of any kind are answered, or refused as theirs."""

    @hypothesis.settings(max_examples=60, deadline=None, database=None, derandomize=True)
    @hypothesis.given(
        st.lists(TOOL, max_size=3) | ANY, CHOICE, st.lists(ITEM, max_size=3), FORMS, st.booleans()
    )
    def asked(tools, choice, said, forms, stream):
        body = {"tools": tools, "tool_choice": choice, "temperature": 1.0, "seed": 1, **forms}
        body |= {"stream": stream, "max_tokens": 4, "max_output_tokens": 4, "prompt": "Is it?"}
        last = {"role": "user", "content": "Is it warm?"}
        body |= {"messages": [*said, last]} if path == CHAT else {"input": [*said, last]}
        answer = serving.post(path, **body)
        assert answer.status_code < 500, answer.text
        assert "server_error" not in answer.text

    asked()
    assert serving.client.get("/ready").status_code == 200


def test_definitions_beyond_the_context_are_refused_before_they_are_tokenised(serving, monkeypatch):
    encoded = []
    encode = Tokenizer.encode

    def watched(self, text, special=False):
        encoded.append(len(text))
        return encode(self, text, special)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    tool = {"type": "function", "function": {"name": "f", "description": "x" * 1_000_000}}
    answer = serving.post(CHAT, messages=ASKED, tools=[tool])
    assert answer.status_code == 400 and "characters" in answer.json()["error"]["message"]
    arguments = json.dumps({"a": "x" * 1_000_000})
    call = {"id": "a" * 9, "function": {"name": "f", "arguments": arguments}}
    messages = [*ASKED, {"role": "assistant", "tool_calls": [call]}]
    assert serving.post(CHAT, messages=messages).status_code == 400
    assert max(encoded, default=0) < 100_000


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('[{"name": "a", "arguments": {"b": 1}}]', [("a", '{"b": 1}')]),
        ('[{"name": "a", "arguments": {}}, {"name": "b", "argu', [("a", "{}")]),
        ('[{"name": "a", "arguments": {}},{"name":"b","arguments":{"c": "d', [("a", "{}"),
         ("b", '{"c": "d')]),
        ('[{"name": "a", "arguments": ', [("a", "")]),
        ('[{"name": "a', []),
        ("[", []),
        ("", []),
    ],
)  # fmt: skip
def test_calls_that_were_cut_are_calls(text, calls):
    assert [(it.name, it.arguments) for it in begun_calls(text)] == calls


def test_required_calls_that_are_cut_are_no_text(serving):
    """Whatever their length, whole and as a stream, in chats and in responses."""
    seen = set()
    for most in (3, 9, 30, 60):
        asked = {"tools": [WEATHER], "tool_choice": "required", **DRAWN, "max_tokens": most}
        [choice] = serving.post(CHAT, messages=ASKED, **asked).json()["choices"]
        assert not choice["message"]["content"]
        seen.add((choice["finish_reason"], bool(choice["message"].get("tool_calls"))))
        streamed = serving.post(CHAT, messages=ASKED, stream=True, **asked).text
        assert not re.search(r'"content": ?"[^"]', streamed)
    assert ("length", True) in seen
