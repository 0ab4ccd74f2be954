"""Request bodies as models: known fields of the right type, or 400; others are noted."""

import dataclasses
import functools
import itertools
import json
import reprlib
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Self

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
_MOST_NOTED = 16  # unknown fields; of one more it is said that there are more
MOST_CHOICES = 64  # answers to a request, of all its prompts together
_SAMPLING = (
    "temperature", "top_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_tokens", "min_p", "allowed_token_ids",
)  # fmt: skip
_NOTED = reprlib.Repr(maxlist=_MOST_NOTED, maxstring=80)
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
    "none_required": "nothing; leave it out",
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
        "object_hook": lambda value: value,
        "parse_int": lambda value: int(value),
        "parse_float": lambda value: float(value),
    }


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number in JSON")


class Fields(pydantic.BaseModel):
    """Fields of a body, or of an object in it; null is as good as absent."""

    model_config = pydantic.ConfigDict(strict=True, frozen=True, allow_inf_nan=False, extra="allow")

    @classmethod
    def read(cls, values: Mapping[str, Any], at: str = "") -> Self:
        """Those of a body, or of an object ``at`` a place in it. Raises Problem 400."""
        try:
            return cls.model_validate(values)
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
    @functools.cache
    def names(cls) -> Mapping[str, str]:
        """Those that a body has them under, and what they are called here."""
        return {field.alias or name: name for name, field in cls.model_fields.items()}

    @pydantic.model_validator(mode="before")
    @classmethod
    def _said(cls, values: Any) -> Any:
        """Those that are said, and of the unknown, which may be very many, the first."""
        if not isinstance(values, dict):
            return values
        known = {name: values[name] for name in cls.names() if values.get(name) is not None}
        unknown = (it for it in values.items() if it[0] not in known and it[1] is not None)
        return known | dict(itertools.islice(unknown, _MOST_NOTED + 1))


def _unread(place: str, value: Any) -> Iterator[str]:
    """Places in a value that no model has."""
    if isinstance(value, Fields):
        for name in value.model_extra or ():
            yield f"{place}.{name}"
        for alias, name in value.names().items():
            yield from _unread(f"{place}.{alias}", getattr(value, name))
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from _unread(f"{place}[{number}]", one)


def ignored(read: Fields, at: str = "") -> list[str]:
    """A note on what was sent ``at`` a place and nothing is made of; none where all is read."""
    return note_of(it.removeprefix(".") for it in _unread(at, read))


def note_of(names: Iterable[str]) -> list[str]:
    """A note on fields that nothing is made of; none where there are none."""
    shown = list(itertools.islice(names, _MOST_NOTED + 1))
    return [f"unknown fields {_NOTED.repr(shown)} of the request are ignored"] if shown else []


def wrong(place: str, value: Any, expected: str) -> Exception:
    """The problem of a field, or of a place in it, that is not what was expected."""
    name = place.partition(".")[0].partition("[")[0]
    return invalid(f"{place}={reprlib.repr(value):.120}: expected {expected}", name)


def undone(*harmless: Any, who: str = "this server", choice: str = "") -> AfterValidator:
    """Of a field that asks for what ``who`` does not do, unless its value is harmless.

    ``choice``: a field before it that may be "none", and then it is not read.
    """

    def check(value: Any, info: pydantic.ValidationInfo) -> Any:
        if value not in harmless and info.data.get(choice) != "none":
            name, shown = info.field_name, reprlib.repr(value)
            raise invalid(f"{name}={shown}: {who} does not do that; leave it out", name)
        return value

    return AfterValidator(check)


def _whole(value: Any) -> Any:
    """JSON may write an integer as 1.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def listed(value: Any) -> Any:
    """A text as a list of one."""
    return [value] if isinstance(value, str) else value


def unlike(expected: str) -> Exception:
    """What a validator raises that expects something else."""
    return PydanticCustomError("expected", expected)


def _guide_of(kind: GuideKind) -> AfterValidator:
    return AfterValidator(
        lambda value: Guide(kind, value if isinstance(value, str) else json.dumps(value))
    )


def _logprobs(value: Any) -> bool | int:
    value = _whole(value)
    if not isinstance(value, int) or not 0 <= value <= MOST_TOP:  # True and False are integers
        raise unlike(f"true, false, or an integer, 0 to {MOST_TOP}")
    return value


def _biases(value: dict[str, Any]) -> tuple[tuple[int, Any], ...]:
    """Token ids, which are texts in JSON, and what is added to their logits."""
    if not all(name.isascii() and name.isdecimal() and len(name) < 11 for name in value):
        raise unlike("token ids and a number for each")
    return tuple((int(name), it) for name, it in value.items() if it is not None)


def _text_or_ids(value: Any) -> Text:
    if not (isinstance(value, str) or is_ids(value)):
        raise unlike("a text, token ids, or an object with either as its text")
    return value


def formatted(asked: dict[str, Any], holder: Any, what: str) -> Guide | None:
    """The form that an answer is asked in; its schema is in ``holder``, and called ``what``."""
    kind = asked.get("type")
    schema = holder.get("schema") if isinstance(holder, dict) else None
    if kind == "json_object":
        schema = {"type": "object"}
    elif kind != "text" and (kind != "json_schema" or not isinstance(schema, dict)):
        raise unlike(f"a type: text, json_object, or json_schema with {what}")
    return None if kind == "text" else Guide("json_schema", json.dumps(schema))


def _response_format(given: dict[str, Any]) -> Guide | None:
    return formatted(given, given.get("json_schema"), "json_schema.schema")


Int = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[Int, Field(ge=1)]
Texts = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(fail_fast=True),
    BeforeValidator(listed),
    AfterValidator(tuple),
]
ChunkCount = Annotated[Count, Field(le=1000)]  # of a question
HitCount = Annotated[Count, Field(le=50)]  # of a search
EmbeddedText = Annotated[str, Field(min_length=1, max_length=1 << 16)]  # of what vectors are made
_Length = Annotated[Count, Field(le=MOST_K)]
_Schema = Annotated[Any, _guide_of("json_schema")]
_Regex = Annotated[str, _guide_of("regex")]
_Many = Annotated[Texts, Field(max_length=MOST_TEXTS)]
_Choice = Annotated[_Many, _guide_of("choice")]


class Named(Fields):
    """What a request names to ask, in its body."""

    model: str | None = None
    knowledge_base: str | None = None


class _Undone(Fields):
    """What OpenAI's and vLLM's clients may say that is not done here."""

    groups: Annotated[Any, undone()] = None  # the key and the proxy say these
    tool_choice: Annotated[Any, undone("none", "auto")] = "auto"
    function_call: Annotated[Any, undone("none", "auto")] = None
    tools: Annotated[list[Any], undone([], choice="tool_choice")] = Field([])
    functions: Annotated[list[Any], undone([], choice="function_call")] = Field([])
    modalities: Annotated[Any, undone(["text"])] = None
    audio: Annotated[Any, undone()] = None
    prediction: Annotated[Any, undone()] = None
    suffix: Annotated[Any, undone("")] = None
    guided_grammar: Annotated[Any, undone()] = None


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
    k: ChunkCount | None = None
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


class _DocumentFields(Fields):
    """A chunk that is given: a text or token ids, and perhaps what they are called."""

    text: Annotated[Any, AfterValidator(_text_or_ids)]
    title: str = ""
    id: Annotated[str | None, BeforeValidator(lambda it: str(it) if type(it) is int else it)] = None


_Document = Annotated[
    _DocumentFields, BeforeValidator(lambda it: it if isinstance(it, dict) else {"text": it})
]


class _StreamOptions(Fields):
    """``include_usage``: its length comes at the end of a stream."""

    include_usage: bool = False


class Generation(SaidFields, Named, _Undone):
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
    response_format: Annotated[dict[str, Any], AfterValidator(_response_format)] | None = None
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
    documents: Annotated[list[_Document], Field(max_length=MOST_TEXTS, fail_fast=True)] | None = (
        None
    )
    neighbours: NeighboursFrom = "corpus"
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    priority: Annotated[Int, Field(ge=0, le=MOST_K)] | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    return_text: bool = False
    _sampling: SamplingParams = pydantic.PrivateAttr()

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
        for alias, name in outputs.names().items():
            asked[f"structured_outputs.{alias}"] = getattr(outputs, name)
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
    def passages(self) -> list[Passage] | None:
        """Its documents."""
        given = self.documents
        return None if given is None else [Passage(it.text, it.title, it.id) for it in given]

    @property
    def said(self) -> dict[str, Any]:
        """Fields of ``Ask`` that the body has, by name."""
        said = {name: getattr(self, name) for name in SaidFields.model_fields}
        said["max_new_tokens"] = self.max_completion_tokens or self.max_tokens
        said["sampling"] = self.sampling
        return {name: value for name, value in said.items() if value is not None}

    def guided(self, guide: Guide) -> Self:
        """With what the answer has to be."""
        found = self.model_copy()
        found._sampling = dataclasses.replace(self.sampling, guide=guide)
        return found


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

    messages: Annotated[list[Any], Field(max_length=MOST_TEXTS)] | None = None
    query: str | None = None

    def conversation(self) -> Conversation:
        """What the messages say. Raises Problem 400 or RequestError."""
        talk = conversation_of(self.messages, self.query, wire=True)
        return self.framed(talk, self.messages or ())
