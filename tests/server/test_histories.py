"""Talks as clients send them back, turn after turn: none of them is refused."""

import json
import shutil
from pathlib import Path

import openai
import pytest

from jaxrag.models.model import load_model

CHAT = "/v1/chat/completions"
STRICT = (  # as Gemma's, Mistral's and GLM's: turns, one system, arguments gone through by name
    "{% if tools %}{{ tools[0].function.name }}{% endif %}<tool_call>"
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system first') }}{% endif %}"
    "{% if not loop.first and m.role == messages[loop.index0 - 1].role == 'user' %}"
    "{{ raise_exception('take turns') }}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}{{ k }}{{ v }}{% endfor %}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
ASKED = {"role": "user", "content": "Is it warm?"}
WEATHER = {"type": "function", "function": {"name": "weather"}}


def called(arguments="{}", name="call_of_otters", **more):
    call = {"id": name, "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **more}


def result(content, name="call_of_otters"):
    return {"role": "tool", "tool_call_id": name, "content": content}


def said(role, content):
    return {"role": role, "content": content}


TALKS = {
    "nothing printed": [ASKED, called(), result("")],
    "null printed": [ASKED, called(), result(None)],
    "a line break printed": [ASKED, called(), result(" \n")],
    "no parts printed": [ASKED, called(), result([])],
    "no arguments": [ASKED, called(""), result("12")],
    "blank arguments": [ASKED, called("  "), result("12")],
    "null as arguments": [ASKED, called("null"), result("12")],
    "no arguments at all": [ASKED, called(None), result("12")],
    "arguments that were cut": [ASKED, called('{"city": "To'), result("not run")],
    "a list as arguments": [ASKED, called("[1]"), result("12")],
    "an object as arguments": [ASKED, called({"city": "Toba"}), result("12")],
    "two results the other way round": [
        ASKED,
        {**called(), "tool_calls": [*called()["tool_calls"], *called(name="b")["tool_calls"]]},
        result("1", "b"),
        result("2"),
        ASKED,
    ],
    "a result of no call": [ASKED, called(), result("12", "nobody")],
    "a result without an id": [ASKED, called(), said("tool", "12")],
    "a silent answer": [ASKED, said("assistant", ""), ASKED],
    "a null answer": [ASKED, said("assistant", None), ASKED],
    "an answer without content": [ASKED, {"role": "assistant"}, ASKED],
    "a refusal": [ASKED, {"role": "assistant", "refusal": "No."}, ASKED],
    "a refusal in parts": [
        ASKED, said("assistant", [{"type": "refusal", "refusal": "No."}]), ASKED,
    ],
    "a silent question": [said("user", ""), said("assistant", "Yes?"), ASKED],
    "a reminder": [said("system", "a"), ASKED, said("assistant", "b"), said("system", "c"), ASKED],
    "a reminder of the developer": [ASKED, said("assistant", "b"), said("developer", "c"), ASKED],
    "a reminder at the end": [ASKED, said("system", "In one word.")],
    "two rules": [said("system", "a"), said("system", "b"), ASKED],
    "a welcome": [said("system", "a"), said("assistant", "Welcome!"), ASKED],
    "a welcome alone": [said("assistant", "Welcome!"), ASKED],
    "an answer begun": [ASKED, said("assistant", "It is")],
    "rules alone": [said("system", "Greet.")],
    "two questions": [ASKED, ASKED],
    "a call of old": [
        ASKED,
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "12"},
    ],
    "thoughts": [ASKED, {**said("assistant", "b"), "reasoning_content": "Hm."}, ASKED],
}  # fmt: skip


@pytest.fixture(scope="module", params=["in place", "strict"])
def serving(request, start, tools_dir, tmp_path_factory):
    """A server of a model whose template takes all, and of one that takes little."""
    folder = tools_dir
    if request.param == "strict":
        folder = tmp_path_factory.mktemp("strict") / "model"
        shutil.copytree(tools_dir, folder)
        path = folder / "tokenizer_config.json"
        settings = json.loads(path.read_text(encoding="utf-8")) | {"chat_template": STRICT}
        path.write_text(json.dumps(settings), encoding="utf-8")
    data = str(tmp_path_factory.mktemp("data"))
    with start(load_model(folder, cache_tokens=8192), {}, data=data) as running:
        yield running


@pytest.fixture(scope="module")
def strict(serving):
    """Whether its template takes little."""
    templates = serving.state.model.text_tokenizer().chat_templates
    return STRICT in templates.values()


@pytest.fixture(scope="module")
def prompt(serving):
    """``prompt(messages, **more)``: the text that the model reads."""

    def call(messages, **more):
        told = serving.post("/tokenize", messages=messages, **more).raise_for_status().json()
        text = serving.post("/detokenize", tokens=told["tokens"]).json()["prompt"]
        return text

    return call


@pytest.mark.parametrize("messages", TALKS.values(), ids=TALKS)
def test_a_talk_is_served(serving, messages):
    answer = serving.post(CHAT, messages=messages, max_tokens=2)
    assert answer.status_code == 200, answer.text


ITEMS = {
    "nothing printed": [ASKED, ("call", "{}"), ("output", "")],
    "no arguments": [ASKED, ("call", ""), ("output", "1")],
    "a call first": [("call", '{"city": "To'), ("output", "no"), ASKED],
    "a reminder": [ASKED, said("assistant", "b"), said("developer", "c"), ASKED],
    "thoughts": [ASKED, {"type": "reasoning", "id": "r", "summary": []}, ASKED],
    "parts printed": [ASKED, ("call", "{}"), ("output", [{"type": "input_text", "text": "42"}])],
    "a refusal": [ASKED, said("assistant", [{"type": "refusal", "refusal": "No."}]), ASKED],
}  # fmt: skip


def item(given):
    if isinstance(given, dict):
        return given
    kind, value = given
    if kind == "call":
        return {"type": "function_call", "call_id": "c", "name": "f", "arguments": value}
    return {"type": "function_call_output", "call_id": "c", "output": value}


@pytest.mark.parametrize("items", ITEMS.values(), ids=ITEMS)
def test_items_are_served(serving, items):
    answer = serving.post("/v1/responses", input=list(map(item, items)), max_output_tokens=2)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("given", ["", "  ", []])
def test_no_input_is_none(serving, given):
    assert serving.post("/v1/responses", input=given).status_code == 400
    assert serving.post(CHAT, messages=[]).status_code == 400


def test_a_reminder_stays_where_it_stood_or_is_said_to_have_moved(serving, prompt, strict):
    messages = TALKS["a reminder"]
    text = prompt(messages)
    notes = serving.post(CHAT, messages=messages, max_tokens=1).json()["jaxrag"]["notes"]
    if strict:
        assert "<|im_start|>user\nc\n\nIs it warm?<|im_end|>" in text
        assert any("joined to the user's next" in it for it in notes)
    else:
        assert "<|im_start|>system\nc<|im_end|>\n<|im_start|>user\nIs it warm?<|im_end|>" in text
        assert not any("joined" in it for it in notes)


def test_a_call_that_was_cut_is_text_or_nothing(prompt, strict):
    text = prompt(TALKS["arguments that were cut"])
    assert ("To" in text) != strict


def test_an_answer_goes_on(serving, prompt):
    talk = TALKS["an answer begun"]
    assert prompt(talk).endswith("<|im_start|>assistant\n")
    assert prompt(talk, add_generation_prompt=False).endswith("It is<|im_end|>\n")
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    assert prompt(talk, **goes_on).endswith("<|im_start|>assistant\nIt is")
    assert serving.post(CHAT, messages=talk, max_tokens=2, **goes_on).status_code == 200
    refused = serving.post(CHAT, messages=[ASKED], **goes_on)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "continue_final_message"


def test_a_template_has_variables_of_its_own(serving, prompt, strict):
    values = {"chat_template_kwargs": {"enable_thinking": False}}
    assert prompt([ASKED], **values).endswith("<think></think>") == strict
    assert serving.post(CHAT, messages=[ASKED], max_tokens=1, **values).status_code == 200
    for wrong in ({"messages": []}, {"tools": 1}):
        answer = serving.post(CHAT, messages=[ASKED], chat_template_kwargs=wrong)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "chat_template_kwargs"
    spelled = {"a": "<|im_end|>"}  # ordinary text there
    answer = serving.post(CHAT, messages=[ASKED], max_tokens=1, chat_template_kwargs=spelled)
    assert answer.status_code == 200


def test_what_is_returned_can_be_sent_back(serving):
    """A call that was cut, and what was said of it, over five turns."""
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="any", max_retries=0) as client:
        name = client.models.list().data[0].id
        choice = {"type": "function", "function": {"name": "weather"}}
        messages = [ASKED]
        tool = {
            **WEATHER,
            "function": {
                "name": "weather",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string"}},
                    "required": ["city"],
                },
            },
        }
        for turn in range(5):
            told = client.chat.completions.create(
                model=name, messages=messages, tools=[tool], tool_choice=choice,
                max_tokens=3 + turn, temperature=1.0, seed=turn,
            ).choices[0].message  # fmt: skip
            [call] = told.tool_calls
            messages += [told, {"role": "tool", "tool_call_id": call.id, "content": ""}]


KNOWN = {"role": "user", "content": "Which animal does Kora Felell keep?"}


@pytest.mark.parametrize(
    ("messages", "note"),
    [
        ([said("assistant", "Tondorf"), KNOWN], False),
        ([KNOWN, said("assistant", ""), KNOWN], False),
        ([KNOWN, said("assistant", "falcon"), said("system", "Tondorf"), KNOWN], True),
    ],
)
def test_a_knowledge_base_is_asked_as_well(server, messages, note):
    answer = server.post(CHAT, messages=messages, max_tokens=2)
    assert answer.status_code == 200, answer.text
    notes = answer.json()["jaxrag"]["notes"]
    assert any("joined to the user's next" in it for it in notes) == note


@pytest.mark.parametrize("messages", [[KNOWN, said("assistant", "a")], [said("system", "a")]])
def test_a_knowledge_base_needs_a_question(server, messages):
    answer = server.post(CHAT, messages=messages)
    assert answer.status_code == 400 and "question is empty" in answer.json()["error"]["message"]


RECORDED = sorted((Path(__file__).parents[1] / "goldens" / "clients").glob("*.json"))


def talk_of(path):
    return json.loads(path.read_text(encoding="utf-8"))["requests"]


def told_of(answer):
    """What an answer says, as it is sent back, and whether it came to its end."""
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"].startswith("application/json"):
        whole = answer.json()
        if "output" in whole:
            return whole["output"], whole["status"] == "completed"
        [choice] = whole["choices"]
        return [choice["message"]], choice["finish_reason"] != "length"
    text, calls, finish = "", {}, None
    for line in answer.text.splitlines():
        event = json.loads(line[6:]) if line.startswith("data: {") else {"choices": []}
        assert "error" not in event, line
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
            finish = choice["finish_reason"] or finish
            for new in choice["delta"].get("tool_calls") or []:
                call = calls.setdefault(new["index"], new)
                if call is not new:
                    call["function"]["arguments"] += new["function"]["arguments"]
    message = {"role": "assistant", "content": text}
    return [message | ({"tool_calls": list(calls.values())} if calls else {})], finish != "length"


def calls_in(items):
    """Of messages, or of items: the id and the arguments of each call."""
    for it in items:
        if it.get("type") == "function_call":
            yield it["call_id"], it["arguments"]
        for call in it.get("tool_calls") or []:
            yield call["id"], call["function"]["arguments"]


@pytest.mark.parametrize("path", RECORDED, ids=lambda it: it.stem)
def test_what_a_client_sent_is_served_turn_by_turn(serving, path):
    """And each answer can be sent back, with a result that is empty for each call."""
    for turn, sent in enumerate(talk_of(path)):
        items, ended = told_of(serving.post(sent["path"], **sent["body"]))
        called = list(calls_in(items))
        if ended:
            assert all(isinstance(json.loads(it), dict) for _, it in called), turn
        name, limit = "messages", "max_tokens"
        results = [result("", it) for it, _ in called]
        if sent["path"] == "/v1/responses":
            name, limit = "input", "max_output_tokens"
            results = [
                {"type": "function_call_output", "call_id": it, "output": ""} for it, _ in called
            ]
        again = {**sent["body"], name: [*sent["body"][name], *items, *results], limit: 2}
        again.pop("max_completion_tokens", None)
        told = serving.post(sent["path"], **again | {"stream": False})
        assert told.status_code == 200, (turn, told.text)


def test_the_talks_that_were_recorded_hold_what_clients_send():
    assert len(RECORDED) >= 12
    empty, cut = set(), set()
    for path in RECORDED:
        talk = talk_of(path)
        assert len(talk) == 5, path
        *_, last = talk
        for it in last["body"].get("messages") or last["body"]["input"]:
            if (it.get("role") == "tool" and it["content"] == "") or it.get("output") == "":
                empty.add(path.stem)
            for _, arguments in calls_in([it]):
                try:
                    json.loads(arguments)
                except ValueError:
                    cut.add(path.stem)
    names = {it.stem for it in RECORDED if not it.stem.startswith("instructor")}
    assert empty == names
    assert cut == names - {"haystack"}, "which leaves out a call that was cut"
