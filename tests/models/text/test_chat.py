"""What chat templates may use, and what the sandbox keeps from them."""

import datetime

import pytest
from refusal import refused

from jaxrag.base.errors import TokenizerError
from jaxrag.models.text import chat
from jaxrag.models.text.chat import render_template

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "<b>你好</b>"},
]


def render(source, messages=MESSAGES, *, prompt=True, now=None):
    return render_template(
        source, messages, {"bos_token": "<s>"}, add_generation_prompt=prompt, now=now
    )


def test_a_template_as_models_ship_them():
    source = """{{ bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{% continue %}{% endif %}
    {{- '<|' + message['role'] + '|>' + message['content'] | trim }}
    {%- generation %}!{% endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""
    assert render(source) == "<s><|user|><b>你好</b>!<|assistant|>"
    assert render(source, prompt=False) == "<s><|user|><b>你好</b>!"


def test_blocks_leave_no_blank_lines():
    assert render("{% if true %}\n    {% set x = 1 %}\na\n{% endif %}\nb") == "a\nb"


def test_tojson_keeps_characters():
    assert render("{{ messages[1] | tojson }}") == '{"role": "user", "content": "<b>你好</b>"}'
    assert render("{{ {'b': 1, 'a': 2} | tojson(indent=1) }}") == '{\n "b": 1,\n "a": 2\n}'


def test_the_date_can_be_fixed():
    now = datetime.datetime(2024, 7, 26)
    assert render("{{ strftime_now('%d %b %Y') }}", now=now) == "26 Jul 2024"
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)


def test_absent_names_are_empty():
    assert (
        render("{% if tools %}x{% endif %}{% if not documents %}y{% endif %}{{ nothing }}") == "y"
    )


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", ""),
        ("{% for %}", ""),
        ("{{ messages.__class__.__mro__ }}", ""),
        ("{{ messages.append(1) }}", ""),
        ("{{ ''.__class__.__base__.__subclasses__() }}", ""),
        ("{{ nothing.attribute }}", ""),
    ],
)
def test_refusals(source, words):
    with refused(TokenizerError, words):
        render(source)


def test_messages_are_not_changed():
    with pytest.raises(TokenizerError):
        render("{% set _ = messages[0].update({'role': 'x'}) %}")
    assert MESSAGES[0]["role"] == "system"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "1"),
        ("{{ 'a' * 10 ** 10 }}", ""),
        ("{{ '%10000000000d' % 1 }}", ""),
        ("{{ 'a' * 7000 }}", ""),
        ("{{ range(10 ** 9) }}", ""),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", ""),
        ("{{ 1 / 0 }}", ""),
        ("{{ 'a' + 1 }}", ""),
        ("{% include 'x' %}", ""),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", ""),
    ],
    ids=["time", "product", "format", "text", "range", "recursion", "zero", "types",
         "include", "parentheses"],
)  # fmt: skip
def test_limits(source, words, monkeypatch):
    monkeypatch.setattr(chat, "MAX_SECONDS", 1)
    monkeypatch.setattr(chat, "MAX_CHARACTERS", 6999)
    with refused(TokenizerError, words) as raised:
        render(source)
    assert "\n" not in str(raised.value)
    assert render("{{ messages[0].content }}") == "Be brief."  # by the same process, or a new one


def test_a_prompt_is_rendered_once_where_its_date_is_fixed(monkeypatch):
    now = datetime.datetime(2024, 7, 26)
    text = render("{{ strftime_now('%d') }} once", now=now)
    monkeypatch.setattr(chat._WORKER_PROCESS, "render", lambda line: "again")
    assert render("{{ strftime_now('%d') }} once", now=now) == text == "26 once"
    assert render("{{ strftime_now('%d') }} once") == "again"


def test_a_forked_child_has_a_process_of_its_own(monkeypatch):
    render("{{ bos_token }}")
    parents = chat._WORKER_PROCESS._process
    monkeypatch.setattr(chat._WORKER_PROCESS, "_owner", -1)  # as a child finds it
    assert render("{{ bos_token }}") == "<s>"
    assert chat._WORKER_PROCESS._process is not parents
    assert parents.poll() is None
    chat._WORKER_PROCESS.stop()
    with parents:
        parents.stdin.close()
    assert parents.returncode == 0
