"""What is said of a question: one dataclass, read by the command line, Python and HTTP."""

import dataclasses
import typing
from typing import get_args

import pytest

from jaxrag import METHODS, agenerate, generate
from jaxrag.base.errors import RequestError
from jaxrag.base.options import choices_of
from jaxrag.cli.command import command, from_fields, parse
from jaxrag.cli.options import GENERATION
from jaxrag.library.options import SearchMode
from jaxrag.reuse.decode import DECODE_RULES
from jaxrag.reuse.names import DECODE_NAMES, METHOD_NAMES, Misses
from jaxrag.serve.ask import Ask
from jaxrag.serve.generate import AskFields
from jaxrag.server.fields import Generation

FIELDS = {field.name: field for field in dataclasses.fields(Ask)}
SAID = {
    "method": "epic", "recompute_ratio": 0.5, "misses": "in_place", "prefix_cache": True,
    "decode": "snapkv", "k": 3, "search_mode": "bm25", "min_score": 0.5, "unanswerable": "ask",
    "stop": ("x",), "cite": "spans",
}  # fmt: skip


def test_python_takes_every_field():
    assert set(typing.get_type_hints(AskFields)) == {
        "kb",
        "documents",
        "neighbours",
        "model",
        "batch_size",
        *FIELDS,
    }


@pytest.mark.parametrize("function", [generate, agenerate])
def test_a_keyword_that_is_none_is_refused_at_the_call(function):
    words = rf"{function.__name__}\(\) got an unexpected keyword argument 'chunks'"
    with pytest.raises(TypeError, match=words):
        function("Who?", chunks=3)


def test_the_same_things_said_in_options_and_in_a_body():
    asking = command("ask", print, "ask", None, GENERATION)
    words = (
        "--method epic --recompute-ratio 0.5 --misses in_place --prefix-cache --decode snapkv "
        "--k 3 --search bm25 --min-score 0.5 --unanswerable ask --stop x --cite spans"
    )
    assert from_fields(Ask, parse(asking, words.split())) == Ask(**SAID)
    found = Generation.read({**SAID, "stop": "x", "max_tokens": 7, "temperature": 0}).said
    sampling = found.pop("sampling")
    assert sampling.temperature == 0 and found == {**SAID, "max_new_tokens": 7}


def test_names_for_help_are_the_keys_of_the_tables():
    assert tuple(METHODS) == METHOD_NAMES and tuple(DECODE_RULES) == DECODE_NAMES
    assert choices_of(FIELDS["misses"]) == get_args(Misses)
    assert choices_of(FIELDS["search_mode"]) == get_args(SearchMode)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"earlier_turns": "some"}, "earlier_turns='some': expected one of exact, blocks"),
        ({"unanswerable": ["ask"]}, r"unanswerable=\['ask'\]: expected one of abstain, ask"),
        ({"blocks": "a text"}, "blocks='a text' is one text"),
        ({"method": 3}, "method=3: expected a preset's name"),
    ],
)
def test_what_cannot_be_meant_is_refused(said, words):
    with pytest.raises(RequestError, match=words):
        Ask(**said)
