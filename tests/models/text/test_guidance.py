"""Guided answers: whatever is drawn of what is allowed, the text is of the form."""

import json
import random
import re
import string

import jsonschema
import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import EngineError, RequestError
from jaxrag.base.guide import Guide
from jaxrag.models.text.guidance import Grammar
from jaxrag.models.text.tokenizer import Tokenizer

EXPRESSIONS = (
    r"yes|no", r"[a-z]{3,8}", r"[0-9]{4}-[0-9]{2}-[0-9]{2}", r"(ab|cd){2,5}x?", r"[^\n]{1,20}\.",
    r"(Mr|Mrs)\. [A-Z][a-z]+", r"-?(0|[1-9][0-9]{0,5})(\.[0-9]{1,3})?", r"#[0-9a-f]{6}",
    r"([0-9]{1,3}\.){3}[0-9]{1,3}", r"(true|false|null)",
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return Tokenizer.load(model_dir)


@pytest.fixture(scope="module")
def grammar_of(tokenizer):
    def make(kind, text, **how):
        given = {"vocab_size": 600, "eos_ids": frozenset(tokenizer.eos_ids)} | how
        return Grammar(tokenizer, Guide(kind, text), **given)

    return make


def drawn(grammar, tokenizer, draw, most=400):
    """A text of tokens that are allowed, and whether it came to its end."""
    matcher, ids = grammar.matcher(), []
    allowed = matcher.allowed()
    while allowed is not None and len(ids) < most:
        choices = np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little"))
        assert choices[-1] < 600
        token_id = int(draw.choice(choices))
        if token_id in tokenizer.eos_ids:
            return tokenizer.decode(ids), True
        allowed = matcher.next if matcher.take(token_id) else None
        ids.append(token_id)
    return tokenizer.decode(ids), allowed is None


def some_schema(draw, depth=3):
    """A schema of nothing that goes on for ever."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "pattern", "anyOf", "const"]
    kind = draw.choice(kinds + ["object", "array"] * 3 * (depth > 0))
    if kind == "object":
        names = draw.sample(string.ascii_lowercase, draw.randrange(1, 5))
        return {
            "type": "object",
            "properties": {it: some_schema(draw, depth - 1) for it in names},
            "required": draw.sample(names, draw.randrange(len(names) + 1)),
            "additionalProperties": False,
        }
    if kind == "array":
        least = draw.randrange(3)
        items = some_schema(draw, depth - 1)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + 2}
    if kind == "integer":
        return {"type": "integer", "minimum": draw.randrange(-50, 5), "maximum": 60}
    return {
        "string": {"type": "string", "maxLength": draw.randrange(3, 12)},
        "number": {"type": "number", "minimum": 0, "maximum": 1},
        "enum": {"enum": [1, "two", None, 'qu"ote', [3]][: draw.randrange(1, 6)]},
        "pattern": {"type": "string", "pattern": "^[a-c]{2,4}$"},
        "anyOf": {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 3}]},
        "const": {"const": draw.choice(["here", 7, {"a": 1}])},
    }.get(kind, {"type": kind})


@pytest.mark.parametrize("part", range(10))
def test_texts_of_schemas_parse_and_conform(grammar_of, tokenizer, part):
    """Two hundred random schemas; a text that is cut short is the beginning of one."""
    complete = 0
    for seed in range(20 * part, 20 * part + 20):
        draw = random.Random(seed)
        schema = some_schema(draw)
        text, ended = drawn(grammar_of("json_schema", json.dumps(schema)), tokenizer, draw)
        complete += ended
        if ended:
            jsonschema.validate(json.loads(text), schema)
    assert complete >= 15


def some_expression(draw, depth=3):
    """A regular expression of nothing that goes on for ever."""
    if not depth:
        return draw.choice(["[a-f]", "[^x\\n]", "\\.", "zu", "[0-9A-F]", "é", " "])
    parts = [some_expression(draw, depth - 1) for _ in range(draw.randrange(1, 4))]
    form = draw.choice(["{}", "({})", "({})?", "({}){{1,3}}"])
    return form.format(draw.choice(["", "|"]).join(parts))


@pytest.mark.parametrize(
    "expression", (*EXPRESSIONS, *(some_expression(random.Random(seed)) for seed in range(40)))
)
def test_texts_of_expressions_match(grammar_of, tokenizer, expression):
    grammar, complete = grammar_of("regex", expression), 0
    for seed in range(5):
        text, ended = drawn(grammar, tokenizer, random.Random(seed), 120)
        complete += ended
        assert not ended or re.fullmatch(expression, text)
    assert complete


def test_a_choice_is_one_of_its_texts(grammar_of, tokenizer):
    texts = ["yes", 'no, "not" so', "über\n\\d", "yes, but"]
    grammar = grammar_of("choice", json.dumps(texts))
    found = {drawn(grammar, tokenizer, random.Random(seed)) for seed in range(60)}
    assert found == {(it, True) for it in texts}


def test_what_is_not_allowed_is_refused(grammar_of, tokenizer):
    matcher = grammar_of("choice", '["yes"]').matcher()
    with refused(EngineError):
        matcher.take(int(tokenizer.encode("no")[0]))


MANY = {"anyOf": [{"type": "object", "properties": {"a": {"const": it}}} for it in range(300)]}


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("json_schema", "{", ""),
        ("json_schema", "[1]", ""),
        ("json_schema", '{"type": "foo"}', ""),
        ("json_schema", "false", ""),
        ("json_schema", '{"$ref": "#"}', "a $ref to itself"),
        ("json_schema", '{"properties": {"a": ' * 64 + "{}" + "}}" * 64, "recursion"),
        ("json_schema", json.dumps(MANY), "max is 2000"),
        ("json_schema", json.dumps({"anyOf": MANY["anyOf"] * 2}), "it has 1800 properties that"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', ""),
        ("json_schema", '{"$ref": "http://localhost/x"}', ""),
        ("json_schema", '{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}', ""),
        ("json_schema", '{"properties": {"a": ' * 1500 + "{}" + "}}" * 1500, ""),
        ("regex", "(a", ""),
        ("regex", "(?=x)y", ""),
        ("regex", "(" * 3000 + ")" * 3000, ""),
        ("choice", "[]", ""),
        ("choice", '["a", 1]', ""),
    ],
)
def test_what_no_answer_can_be_is_refused_in_one_line(grammar_of, kind, text, words):
    with refused(RequestError, words) as caught:
        grammar_of(kind, text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "string", "format": "password", "maxLength": 3}, "Unknown format: password"),
        ({"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}}, "uniqueItems"),
        ({"enum": ["a"], "not": {"const": "b"}}, "not"),
        ({"oneOf": [{"enum": ["a", "b"]}, {"const": "a"}]}, "oneOf"),
        (True, None),
        ({"type": "string", "format": "date"}, None),
    ],
)
def test_what_no_answer_is_held_to_is_noted(grammar_of, tokenizer, schema, words):
    grammar = grammar_of("json_schema", json.dumps(schema))
    assert len(grammar.notes) == (words is not None)
    assert all("not held to" in it and words in it for it in grammar.notes)
    text, ended = drawn(grammar, tokenizer, random.Random(1))
    assert not ended or json.loads(text) is not ...


@pytest.mark.parametrize("folder", ["model_dir", "chat_model_dir"])
def test_special_tokens_that_a_form_spells_are_ordinary_text(request, folder):
    tokenizer = Tokenizer.load(request.getfixturevalue(folder))
    eos_ids = frozenset(tokenizer.eos_ids)
    special = {tokenizer.encode(it, special=True)[0] for it in tokenizer.added_tokens}
    for token in tokenizer.added_tokens:
        for text, kind, guide in (
            (f"{token} is a marker", "choice", [f"{token} is a marker"]),
            (f'"{token}x"', "json_schema", {"enum": [f"{token}x"]}),
            (f'{{"{token}": 1}}', "json_schema", {
                "type": "object", "properties": {token: {"const": 1}}, "required": [token],
                "additionalProperties": False,
            }),
        ):  # fmt: skip
            grammar = Grammar(tokenizer, Guide(kind, json.dumps(guide)), 600, eos_ids)
            for seed in range(3):
                assert drawn(grammar, tokenizer, random.Random(seed)) == (text, True)
            matcher = grammar.matcher()
            for token_id in tokenizer.encode(text)[:-1]:
                assert token_id not in special and matcher.take(int(token_id))


def test_a_form_that_gets_too_complex_is_the_requests_fault(grammar_of, tokenizer):
    """Where no try found it before."""
    schema = {
        "type": "array",
        "prefixItems": [{"type": "string", "pattern": "^[ab]{60}$"}, MANY],
        "minItems": 2,
    }
    matcher = grammar_of("json_schema", json.dumps(schema)).matcher()
    with refused(RequestError, "too complex"):
        for token_id in tokenizer.encode(json.dumps(["a" * 60, {"a": 1}])):
            matcher.take(int(token_id))


def test_a_model_without_an_end_is_refused(grammar_of):
    with refused(RequestError):
        grammar_of("regex", "a", eos_ids=frozenset())


def test_a_vocabulary_of_words_is_refused(word_model_dir):
    tokenizer = Tokenizer.load(word_model_dir)
    with refused(RequestError):
        Grammar(tokenizer, Guide("regex", "a"), 470, frozenset({2}))
