"""Calls of tools are read in the forms of each family, and in no other text."""

import json

import pytest
from refusal import refused

from jaxrag.base.errors import RequestError
from jaxrag.serve.calls import ToolCall, calls_of, form_of, sure_text

NAMES = {"weather", "add"}
ROME = ToolCall("weather", '{"city": "Rome", "days": 3}')
ADD = ToolCall("add", '{"a": 1}')
NAMED = '{"name": "weather", "arguments": {"city": "Rome", "days": 3}}'
ADDED = '{"name": "add", "arguments": {"a": 1}}'
GLM = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
CODER = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
BOTH = f"<tool_call>\n{NAMED}\n</tool_call>\n<tool_call>\n{ADDED}\n</tool_call>"
LLAMA = NAMED.replace("arguments", "parameters")
CALLS = [  # as models write them
    ("hermes", f"<tool_call>\n{NAMED}\n</tool_call>", "", [ROME]),
    ("hermes", f"I look.\n\n{BOTH}", "I look.", [ROME, ADD]),
    ("hermes", ADDED, "", [ADD]),
    ("hermes", f"<tool_call>{ADDED}", "", [ADD]),
    ("llama", LLAMA, "", [ROME]),
    ("llama", f"<|python_tag|>{LLAMA}", "", [ROME]),
    ("llama", f'{{"name": "add", "parameters": {{"a": 1}}}}; {LLAMA}', "", [ADD, ROME]),
    ("mistral", f"[TOOL_CALLS] [{NAMED}]", "", [ROME]),
    ("mistral", f" [{ADDED}, {ADDED}]", "", [ADD, ADD]),
    ("mistral", f"<|tool_call|>[{NAMED}]<|/tool_call|>", "", [ROME]),
    ("coder", f"So.\n{CODER}\n{CODER}", "So.", [ROME, ROME]),
    ("glm", f"So.{GLM}", "So.", [ROME]),
    ("glm_4", 'weather\n{"city": "Rome", "days": 3}', "", [ROME]),
]
TEXTS = [
    ("hermes", "It is sunny <b>today</b>."),
    ("hermes", '<tool_call>\n{"name": "nobody", "arguments": {}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>'),
    ("hermes", "<tool_call>\nno JSON\n</tool_call>"),
    ("llama", '{"a": 1}'),
    ("llama", '{"name": "add", "parameters": {"a": 1}} and more'),
    ("llama", "It is sunny."),
    ("mistral", "[1, 2]"),
    ("mistral", "[see the note]"),
    ("glm", "It is <tool_call></tool_call>"),
    ("coder", "<tool_call>weather</tool_call>"),
    ("glm_4", "weather\nis what it is"),
    ("glm_4", "add"),
]


@pytest.mark.parametrize(("form", "text", "said", "calls"), CALLS)
def test_calls_are_read(form, text, said, calls):
    assert calls_of(text, form, NAMES) == (said, calls)


@pytest.mark.parametrize(("form", "text"), TEXTS)
def test_what_is_no_call_stays_text(form, text):
    assert calls_of(text, form, NAMES) == (text, [])


@pytest.mark.parametrize(("form", "text"), [*TEXTS, *((form, text) for form, text, *_ in CALLS)])
def test_what_a_stream_has_told_is_never_taken_back(form, text):
    """Cut anywhere, what is surely text is the beginning of what is said in the end."""
    said, _ = calls_of(text, form, NAMES)
    ends = [sure_text(text[:end], form, NAMES) for end in range(len(text) + 1)]
    assert ends == sorted(ends)
    assert all(said.startswith(text[:end]) for end in ends)


def test_text_is_told_as_it_comes():
    for form in ("hermes", "llama", "mistral", "glm", "coder", "glm_4"):
        assert sure_text("It is sunny", form, NAMES) == 11


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ tools }}<tool_call>", "hermes"),
        ("<tool_call>{name}\n<arg_key>", "glm"),
        ("<tool_call>\n<function=name>", "coder"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|tool_call|>", "mistral"),
        ("<|python_tag|>", "llama"),
        ("<|assistant|><|observation|>", "glm_4"),
    ],
)
def test_the_form_is_that_of_the_template(template, form):
    assert form_of(template) == form


def test_a_template_without_calls_is_refused():
    with refused(RequestError):
        form_of("{{ messages }}")


def test_arguments_are_json():
    [call] = calls_of(CALLS[-2][1], "glm", NAMES)[1]
    assert json.loads(call.arguments) == {"city": "Rome", "days": 3}
