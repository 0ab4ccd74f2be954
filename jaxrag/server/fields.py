"""Request bodies as models: known fields of the right type, or 400; others are ignored."""

import dataclasses
import itertools
import json
import reprlib
import secrets
from collections.abc import Mapping, Sequence, Set
from typing import Annotated, Any, Self, TypeGuard

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator
from pydantic_core import PydanticCustomError

from jaxrag.base.guide import Guide, GuideKind
from jaxrag.engine.sampling_params import (
    MOST_BIASES,
    MOST_K,
    MOST_SEED,
    MOST_TOP,
    MOST_WORDS,
    SamplingParams,
)
from jaxrag.library.options import NeighboursFrom, SearchMode
from jaxrag.models.text.chat import RESERVED
from jaxrag.models.text.verbatim import Framing
from jaxrag.reuse.names import Misses
from jaxrag.serve.ask import Cite, EarlierTurns, Plain, Unanswerable, is_ids
from jaxrag.serve.conversation import Conversation, Passage, Text, conversation_of
from jaxrag.server.errors import invalid

LONG_BODY = 256 << 10  # bytes; a longer one makes no other thread wait while it is read
MOST_TEXTS = 4096  # messages, documents or blocks of a request
_MOST_NOTED = 16  # unknown fields
MOST_CHOICES = 64  # answers to a request, of all its prompts together
_CHOICE = {"tools": "tool_choice", "functions": "function_call"}  # "none": they are not read
_UNSUPPORTED = {  # field: what it may be all the same
    "groups": (),  # the key and the proxy say these
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "suffix": ("",),
    "guided_grammar": (),
}
_SAMPLING = (
    "temperature", "top_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_tokens", "min_p", "allowed_token_ids",
)  # fmt: skip
_GUIDES = ("response_format", "guided_json", "guided_regex", "guided_choice")
_EXPECTED = {  # by the kind of pydantic's error
    "bool_type": "true or false",
    "dict_type": "an object",
    "extra_forbidden": "one of json, regex, choice",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "an integer, {ge} or more",
    "int_type": "an integer",
    "less_than_equal": "an integer, at most {le}",
    "list_type": "a list",
    "literal_error": "one of {expected}",
    "missing": "a value",
    "model_type": "an object",
    "string_pattern_mismatch": "a text of the pattern {pattern}",
    "string_too_long": "a text of at most {max_length} characters",
    "string_too_short": "a text that is not empty",
    "string_type": "a text",
    "too_long": "at most {max_length} entries",
    "too_short": "at least {min_length} entries",
}


def body_of(raw: bytes) -> dict[str, Any]:
    """The JSON object that a request carries. Raises Problem 400."""
    try:
        text = raw.decode(json.detect_encoding(raw))  # strictly, which json itself does not
        values = json.loads(text, parse_constant=_refuse_constant, **_hooks(len(raw)))
        if "\\u" in text:  # half of a surrogate pair can be written so
            json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise invalid("the body holds half of a surrogate pair; repair the text") from None
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise invalid(f"the body is not JSON ({why}); send one object") from None
    if not isinstance(values, dict):
        raise invalid(f"the body is {reprlib.repr(values)}; send one JSON object")
    return values


def _hooks(size: int) -> dict[str, Any]:
    # json in C lets no other thread run: half a second for 14 MB. A hook in Python gives way.
    if size <= LONG_BODY:
        return {}
    return {
        "object_hook": lambda it: it,
        "parse_int": lambda it: int(it),
        "parse_float": lambda it: float(it),
    }


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number in JSON")


class Fields(pydantic.BaseModel):
    """Fields of a body, or of an object in it; null is as good as absent."""

    model_config = pydantic.ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    @classmethod
    def read(cls, values: Mapping[str, Any], at: str = "") -> Self:
        """Those of a body, or of an object ``at`` a place in it. Raises Problem 400."""
        given: Any = values
        if isinstance(values, dict):  # of which the rest may be very much
            given = {name: values[name] for name in cls.names() if name in values}
        try:
            return cls.model_validate(given)
        except pydantic.ValidationError as errors:
            error = errors.errors(include_url=False)[0]
        kind, context = error["type"], error.get("ctx", {})
        if kind == "literal_error":
            context = {"expected": context["expected"].replace("'", "").replace(" or ", ", ")}
        expected = _EXPECTED[kind].format(**context) if kind in _EXPECTED else error["msg"]
        place = "".join(f"[{it}]" if isinstance(it, int) else f".{it}" for it in error["loc"])
        value = None if kind == "missing" else error["input"]
        raise wrong((at + place).removeprefix("."), value, expected)

    @classmethod
    def names(cls) -> Set[str]:
        """Those that a body has them under."""
        return {field.alias or name for name, field in cls.model_fields.items()}

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}


def wrong(place: str, value: Any, expected: str) -> Exception:
    """The problem of a field, or of a place in it, that is not what was expected."""
    name = place.partition(".")[0].partition("[")[0]
    return invalid(f"{place}={reprlib.repr(value):.120}: expected {expected}", name)


def _whole(value: Any) -> Any:
    """JSON may write an integer as 1.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def listed(value: Any) -> Any:
    """A text as a list of one."""
    return [value] if isinstance(value, str) else value


def _unlike(expected: str) -> Exception:
    return PydanticCustomError("expected", expected)


def _guide_of(kind: GuideKind) -> AfterValidator:
    return AfterValidator(
        lambda value: Guide(kind, value if isinstance(value, str) else json.dumps(value))
    )


def _logprobs(value: Any) -> bool | int:
    value = _whole(value)
    if not isinstance(value, int) or not 0 <= value <= MOST_TOP:  # True and False are integers
        raise _unlike(f"true, false, or an integer, 0 to {MOST_TOP}")
    return value


def _biases(value: dict[str, Any]) -> tuple[tuple[int, Any], ...]:
    """Token ids, which are texts in JSON, and what is added to their logits."""
    if not all(name.isascii() and name.isdecimal() and len(name) < 11 for name in value):
        raise _unlike("token ids and a number for each")
    return tuple((int(name), it) for name, it in value.items() if it is not None)


def _passages(given: list[Any]) -> tuple[Passage, ...]:
    """Texts, lists of token ids, or objects with a text and perhaps a title and an id."""
    return tuple(_passage(f"documents[{place}]", one) for place, one in enumerate(given))


def _passage(what: str, value: Any) -> Passage:
    if is_text(value):
        return Passage(value)
    if not isinstance(value, dict):
        raise wrong(what, value, "a text, token ids, or an object with a text")
    text, title, name = value.get("text"), value.get("title"), value.get("id")
    if isinstance(name, int) and not isinstance(name, bool):
        name = str(name)
    if not (is_text(text) and isinstance(title, str | None) and isinstance(name, str | None)):
        raise wrong(what, value, "a text, and perhaps a title and an id")
    return Passage(text, title or "", name)


def is_text(value: Any) -> TypeGuard[Text]:
    """Is it a text, or a list of token ids?"""
    return isinstance(value, str) or is_ids(value)


def _formatted(asked: dict[str, Any]) -> Guide | None:
    """``response_format``."""
    kind, schema = asked.get("type"), asked.get("json_schema")
    if kind == "text":
        return None
    if kind == "json_object":
        return Guide("json_schema", json.dumps({"type": "object"}))
    schema = schema.get("schema") if isinstance(schema, dict) else None
    if kind != "json_schema" or not isinstance(schema, dict):
        raise _unlike("a type: text, json_object, or json_schema with json_schema.schema")
    return Guide("json_schema", json.dumps(schema))


Int = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[Int, Field(ge=1)]
Texts = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(fail_fast=True),
    BeforeValidator(listed),
    AfterValidator(tuple),
]
_Length = Annotated[Count, Field(le=MOST_K)]
_Schema = Annotated[Any, _guide_of("json_schema")]
_Regex = Annotated[str, _guide_of("regex")]
_Many = Annotated[Texts, Field(max_length=MOST_TEXTS)]
_Choice = Annotated[_Many, _guide_of("choice")]


class Named(Fields):
    """What a request names to ask, in its body."""

    model: str | None = None
    knowledge_base: str | None = None


class SaidFields(Fields):
    """Those of ``Ask``, in its words; None where it does not say."""

    blocks: _Many | None = None
    earlier_turns: EarlierTurns | None = None
    plain: Plain | None = None
    method: str | None = None
    recompute_ratio: float | None = None
    misses: Misses | None = None
    prefix_cache: bool | None = None
    decode: str | None = None
    k: Annotated[Count, Field(le=1000)] | None = None
    where: dict[str, Any] | None = None
    search_mode: SearchMode | None = None
    min_score: float | None = None
    unanswerable: Unanswerable | None = None
    stop: Annotated[Texts, Field(max_length=16)] | None = None
    cite: Cite | None = None


class _Structured(Fields, extra="forbid"):
    """What an answer has to be, as vLLM writes it."""

    as_json: _Schema | None = Field(None, alias="json")
    regex: _Regex | None = None
    choice: _Choice | None = None


class Generation(SaidFields, Named):
    """What chats and completions have in common, in the words of OpenAI and vLLM.

    Attributes:
      documents: chunks that are given; None: none are, (): there are to be none.
      neighbours: where those of given chunks come from, as of ``generate``.
      choices: answers to each prompt.
      ignore_eos: it goes on behind what would end it.
      logprobs: whether those of its tokens are told, or of how many in the place of each.
      stream: it comes piece by piece.
      priority: class; None: the tenant's own.
      timeout: seconds; None: as the server has it.
      return_text: sources have their texts.
    """

    max_completion_tokens: _Length | None = None
    max_tokens: _Length | None = None
    choices: Annotated[Count, Field(le=MOST_CHOICES)] = Field(1, alias="n")
    best_of: Int | None = None
    temperature: float = 0.0
    top_k: Int = 0
    top_p: float = 1.0
    seed: Int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Annotated[
        dict[str, Any], Field(max_length=MOST_BIASES), AfterValidator(_biases)
    ] = Field({})
    min_tokens: Int = 0
    min_p: float = 0.0
    bad_words: Annotated[Texts, Field(max_length=MOST_WORDS)] | None = None
    allowed_token_ids: Annotated[list[Int], AfterValidator(tuple)] | None = None
    top_logprobs: Int = 0
    logprobs: Annotated[bool | int, PlainValidator(_logprobs)] = False
    response_format: Annotated[dict[str, Any], AfterValidator(_formatted)] | None = None
    guided_json: _Schema | None = None
    guided_regex: _Regex | None = None
    guided_choice: _Choice | None = None
    structured_outputs: _Structured = Field(default_factory=lambda: _Structured.read({}))
    ignore_eos: bool = False
    stop_token_ids: Annotated[
        list[Annotated[Int, Field(ge=0, le=MOST_K)]], Field(max_length=64, fail_fast=True)
    ] = Field([])
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    documents: (
        Annotated[list[Any], Field(max_length=MOST_TEXTS), AfterValidator(_passages)] | None
    ) = None
    neighbours: NeighboursFrom = "corpus"
    stream: bool = False
    stream_options: dict[str, Any] = Field({})
    priority: Annotated[Int, Field(ge=0, le=MOST_K)] | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    return_text: bool = False
    _sampling: SamplingParams = pydantic.PrivateAttr()
    _ignored: list[str] = pydantic.PrivateAttr()

    @classmethod
    def read(cls, values: Mapping[str, Any], at: str = "") -> Self:
        """Problem 400 also for what is not done."""
        names = cls.names()
        for name, harmless in _UNSUPPORTED.items():
            value = values.get(name) if name not in names else None
            unread = values.get(_CHOICE.get(name, "")) == "none"
            if unread and not isinstance(value, list | None):
                raise wrong(name, value, "a list")
            if value is not None and not unread:
                refuse(name, value, harmless, "this server")
        found = super().read(values, at)
        unknown = (it for it in values if it not in names and it not in _UNSUPPORTED)
        found._ignored = list(itertools.islice(unknown, _MOST_NOTED))
        return found

    def model_post_init(self, _: Any) -> None:
        """Raises Problem 400 for what cannot be, and RequestError for a bad sampling."""
        if self.best_of not in (None, self.choices):
            raise wrong("best_of", self.best_of, f"n, which is {self.choices}")
        if self.top_logprobs and self.logprobs is False:
            raise wrong("top_logprobs", self.top_logprobs, "logprobs=true with it")
        seed = self.seed
        if seed is None:  # another draw every time
            seed = secrets.randbelow(MOST_SEED + 1) if self.temperature else 0
        self._sampling = SamplingParams(
            **{name: getattr(self, name) for name in _SAMPLING},
            bad_words=tuple(self.bad_words or ()),
            top_k=max(self.top_k, 0),
            seed=seed % (MOST_SEED + 1),
            logit_bias=tuple(self.logit_bias),  # type: ignore[arg-type]
            top_logprobs=max(self.top_logprobs, 0 if self.logprobs is True else self.logprobs),
            guide=self._guide(),
        )

    def _guide(self) -> Guide | None:
        """What the answer has to be; Problem 400 where it is said twice."""
        outputs = self.structured_outputs
        asked = {name: getattr(self, name) for name in _GUIDES}
        asked |= {
            "structured_outputs.json": outputs.as_json,
            "structured_outputs.regex": outputs.regex,
            "structured_outputs.choice": outputs.choice,
        }
        given = {name: guide for name, guide in asked.items() if guide is not None}
        if len(given) > 1:
            raise invalid(f"{' and '.join(given)}: expected one of them", next(iter(given)))
        if given and self.ignore_eos:
            raise invalid(f"ignore_eos with {next(iter(given))}: leave one out", "ignore_eos")
        return next(iter(given.values()), None)

    @property
    def sampling(self) -> SamplingParams:
        """How its tokens are chosen."""
        return self._sampling

    @property
    def said(self) -> dict[str, Any]:
        """Fields of ``Ask`` that the body has, by name."""
        said = {name: getattr(self, name) for name in SaidFields.model_fields}
        said["max_new_tokens"] = self.max_completion_tokens or self.max_tokens
        said["sampling"] = self.sampling
        return {name: value for name, value in said.items() if value is not None}

    @property
    def include_usage(self) -> bool:
        """Does its length come at the end of a stream?"""
        return self.stream_options.get("include_usage") is True

    @property
    def ignored(self) -> list[str]:
        """Names of the first fields that nothing is made of."""
        return self._ignored

    def guided(self, guide: Guide) -> Self:
        """With what the answer has to be."""
        found = self.model_copy()
        found._sampling = dataclasses.replace(self.sampling, guide=guide)
        return found


def refuse(name: str, value: Any, harmless: Sequence[Any], who: str) -> None:
    """Problem 400 for a field that asks for what is not done."""
    if value not in harmless:
        shown = reprlib.repr(value)
        raise invalid(f"{name}={shown}: {who} does not do that; leave it out", name)


class Templated(Fields):
    """What a chat template is given beside messages, in vLLM's words."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field({})

    def framed(self, talk: Conversation, messages: Sequence[Any]) -> Conversation:
        """Messages so. Raises Problem 400 for what the template cannot be given."""
        if taken := self.chat_template_kwargs.keys() & set(RESERVED):
            name = f"chat_template_kwargs.{min(taken)}"
            raise wrong(name, self.chat_template_kwargs[min(taken)], "another name: it is set here")
        ending: Any = "closed" if self.add_generation_prompt is False else "opened"
        if self.continue_final_message:
            if self.add_generation_prompt or messages[-1].get("role") != "assistant":
                what = "the last message of the assistant, and add_generation_prompt=false"
                raise wrong("continue_final_message", True, what)
            ending = "continued"
        framing = Framing(values=self.chat_template_kwargs, ending=ending)
        return dataclasses.replace(talk, framing=framing)


class Talk(Templated):
    """Messages, and what chunks are found for where that is another text."""

    messages: Any = None
    query: str | None = None

    def conversation(self) -> Conversation:
        """What the messages say. Raises Problem 400 or RequestError."""
        if isinstance(self.messages, list) and len(self.messages) > MOST_TEXTS:
            raise wrong("messages", self.messages, f"at most {MOST_TEXTS} entries")
        talk = conversation_of(self.messages, self.query, wire=True)
        return self.framed(talk, self.messages)
