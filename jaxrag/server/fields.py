"""Request bodies: known fields of the right type, or 400; others are ignored."""

import dataclasses
import json
import math
import reprlib
import secrets
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, TypeGuard

from jaxrag.base.guide import Guide
from jaxrag.base.options import choices_of, kind_of
from jaxrag.engine.sampling_params import MOST_BIASES, MOST_K, MOST_SEED, MOST_TOP, SamplingParams
from jaxrag.serve.ask import Ask, is_ids
from jaxrag.serve.conversation import Conversation, Passage, Text, conversation_of
from jaxrag.server.errors import invalid

LONG_BODY = 256 << 10  # bytes; a longer one makes no other thread wait while it is read
MOST_TEXTS = 4096  # messages, documents or blocks of a request
MOST_CHOICES = 64  # answers to a request, of all its prompts together
_MOST = {"k": 1000, "stop": 16, "blocks": MOST_TEXTS}
_MOST_INTEGER = 2**63 - 1  # where a field has no bound of its own
# Of ``Ask``: not those that a body says in other words, and not what is the server's to say.
_OTHERS = ("template", "max_new_tokens", "sampling", "batch_size", "groups", "passage_rules")
_FIELDS = {it.name: it for it in dataclasses.fields(Ask) if it.name not in _OTHERS}
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_CHOICE = {"tools": "tool_choice", "functions": "function_call"}  # "none": they are not read
_STRUCTURED = ("json", "regex", "choice")
_UNSUPPORTED = {  # field: what it may be all the same
    "groups": (),  # the key and the proxy say these
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "min_p": (0,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "suffix": ("",),
    "guided_grammar": (),
}


def body_of(raw: bytes) -> "Body":
    """The JSON object that a request carries. Raises Problem 400."""
    try:
        values = json.loads(raw, parse_constant=_refuse_constant, **_hooks(len(raw)))
        if b"\\u" in raw:  # half of a surrogate pair can be written so
            json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise invalid("the body holds half of a surrogate pair; repair the text") from None
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise invalid(f"the body is not JSON ({why}); send one object") from None
    if not isinstance(values, dict):
        raise invalid(f"the body is {reprlib.repr(values)}; send one JSON object")
    return Body(values)


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


class Body:
    """The fields of a request; null is as good as absent. Every reader raises Problem 400.

    Attributes:
      values: all that are not null.
      nulls: names of the others.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.nulls = frozenset(name for name, value in values.items() if value is None)
        self.values = {name: value for name, value in values.items() if value is not None}

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def text(self, name: str) -> str | None:
        """A text; None where it is absent."""
        return self._of(name, str, "a text")

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        found = self._of(name, bool, "true or false")
        return default if found is None else found

    def table(self, name: str) -> dict[str, Any] | None:
        """An object."""
        return self._of(name, dict, "an object")

    def integer(self, name: str, least: int, most: int = _MOST_INTEGER) -> int | None:
        """An integer from ``least`` to ``most``."""
        value = self.values.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            unbounded = most == _MOST_INTEGER and not (isinstance(value, int) and value > most)
            to = " or more" if unbounded else f" to {most}"
            raise self.wrong(name, f"an integer, {least}{to}")
        return value

    def number(self, name: str) -> float | None:
        """A finite number."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "a number")
        try:
            found = float(value)
        except OverflowError:
            found = math.inf
        if not math.isfinite(found):
            raise self.wrong(name, "a finite number")
        return found

    def choice(self, name: str, among: Sequence[str]) -> str | None:
        """One of some texts."""
        value = self.text(name)
        if value is not None and value not in among:
            raise self.wrong(name, f"one of {', '.join(among)}")
        return value

    def texts(self, name: str, most: int | None = None) -> tuple[str, ...]:
        """A text or a list of them; () where it is absent."""
        value = self.values.get(name, [])
        found = [value] if isinstance(value, str) else value
        if isinstance(found, list) and most is not None:
            _check_count(name, found, most)
        if not isinstance(found, list) or not all(isinstance(it, str) and it for it in found):
            raise self.wrong(name, "a text that is not empty, or a list of these")
        return tuple(found)

    def field(self, name: str) -> Any:
        """A field of ``Ask``, by its type there."""
        field = _FIELDS[name]
        choices, kind = choices_of(field), kind_of(field)
        if choices is not None:
            return self.choice(name, choices)
        if kind is int:
            return self.integer(name, 1, _MOST.get(name, _MOST_INTEGER))
        if name in ("blocks", "stop"):
            return self.texts(name, _MOST[name])
        readers: dict[Any, Callable[[str], Any]] = {
            str: self.text, bool: self.flag, float: self.number
        }  # fmt: skip
        return readers.get(kind, self.table)(name)

    def wrong(self, name: str, expected: str) -> Exception:
        """The problem of a field that is not what was expected."""
        shown = reprlib.repr(self.values.get(name))
        return invalid(f"{name}={shown}: expected {expected}", name)

    def _of[T](self, name: str, kind: type[T], expected: str) -> T | None:
        value = self.values.get(name)
        if value is not None and not isinstance(value, kind):
            raise self.wrong(name, expected)
        return value


@dataclasses.dataclass(frozen=True)
class Generation:
    """What chats and completions have in common.

    Attributes:
      said: fields of ``Ask`` that the body has, by name.
      documents: chunks that are given; None: none are, (): there are to be none.
      choices: answers to each prompt.
      ignore_eos: it goes on behind what would end it.
      logprobs: those of its tokens are given.
      stream: it comes piece by piece.
      include_usage: and its length at the end.
      priority: class; None: the tenant's own.
      timeout: seconds; None: as the server has it.
      return_text: sources have their texts.
    """

    said: Mapping[str, Any]
    documents: tuple[Passage, ...] | None
    choices: int
    ignore_eos: bool
    logprobs: bool
    stream: bool
    include_usage: bool
    priority: int | None
    timeout: float | None
    return_text: bool


def generation_of(body: Body) -> Generation:
    """The common fields of a body. Raises Problem 400, or RequestError for a bad sampling."""
    _refuse_unsupported(body)
    ignore_eos, said = body.flag("ignore_eos"), asked_of(body)
    timeout = body.number("timeout")
    if timeout is not None and timeout <= 0:
        raise body.wrong("timeout", "seconds above 0")
    options = body.table("stream_options") or {}
    return Generation(
        said=said,
        documents=_documents(body),
        choices=_choices(body),
        ignore_eos=ignore_eos,
        logprobs="logprobs" in body and body.values["logprobs"] is not False,
        stream=body.flag("stream"),
        include_usage=options.get("include_usage") is True,
        priority=body.integer("priority", 0),
        timeout=timeout,
        return_text=body.flag("return_text"),
    )


def asked_of(body: Body) -> dict[str, Any]:
    """The fields of ``Ask`` that a body has; what it asks for in OpenAI's words among them.

    Raises Problem 400 for one of another type, and RequestError for a bad sampling.
    """
    said = {name: body.field(name) for name in _FIELDS if name in body}
    for name in ("max_completion_tokens", "max_tokens"):
        if name in body:
            said["max_new_tokens"] = body.integer(name, 1)
            break
    return said | {"sampling": _sampling(body)}


def _refuse_unsupported(body: Body) -> None:
    for name, harmless in _UNSUPPORTED.items():
        unread = body.values.get(_CHOICE.get(name, "")) == "none"
        if unread and not isinstance(body.values.get(name, []), list):
            raise body.wrong(name, "a list")
        if name in body and body.values[name] not in harmless and not unread:
            raise invalid(
                f"{name}={reprlib.repr(body.values[name])}: this server does not do that; leave it "
                "out",
                name,
            )


def _choices(body: Body) -> int:
    """How many answers to each prompt; ``best_of`` says the same or nothing."""
    count = body.integer("n", 1, MOST_CHOICES) or 1
    if body.integer("best_of", 1) not in (None, count):
        raise body.wrong("best_of", f"n, which is {count}")
    return count


def _sampling(body: Body) -> SamplingParams:
    """Greedy where nothing is said; without a seed another draw every time."""
    temperature = body.number("temperature") or 0.0
    top_k = body.integer("top_k", -1, MOST_K)
    top_p = body.number("top_p")
    seed = body.integer("seed", -_MOST_INTEGER - 1)
    if seed is None:
        seed = secrets.randbelow(MOST_SEED + 1) if temperature else 0
    more: dict[str, Any] = {name: body.number(name) for name in _PENALTIES if name in body}
    return SamplingParams(
        logit_bias=_biases(body),
        min_tokens=body.integer("min_tokens", 0, MOST_K) or 0,
        top_logprobs=_top_logprobs(body),
        guide=_guide(body),
        **more,
        temperature=temperature,
        top_k=max(top_k or 0, 0),
        top_p=1.0 if top_p is None else top_p,
        seed=seed % (MOST_SEED + 1),
    )


def _guide(body: Body) -> Guide | None:
    """What the answer has to be, in the words of OpenAI or vLLM; Problem 400 for two of them."""
    told = {"response_format": _formatted(body)}
    told |= {f"guided_{name}": _structured(body, f"guided_{name}") for name in _STRUCTURED}
    if outputs := body.table("structured_outputs"):
        if unknown := set(outputs) - set(_STRUCTURED):
            expected = ", ".join(_STRUCTURED)
            raise invalid(
                f"structured_outputs.{sorted(unknown)[0]}: expected one of {expected}",
                "structured_outputs",
            )
        told |= {f"structured_outputs.{it}": _structured(Body(outputs), it) for it in outputs}
    given = {name: guide for name, guide in told.items() if guide is not None}
    if len(given) > 1:
        raise invalid(f"{' and '.join(given)}: expected one of them", next(iter(given)))
    if given and body.flag("ignore_eos"):
        raise invalid(f"ignore_eos with {next(iter(given))}: leave one out", "ignore_eos")
    return next(iter(given.values()), None)


def _formatted(body: Body) -> Guide | None:
    """``response_format``."""
    asked = body.table("response_format")
    if asked is None or asked.get("type") == "text":
        return None
    if asked.get("type") == "json_object":
        return Guide("json_schema", json.dumps({"type": "object"}))
    schema = Body(asked).table("json_schema") or {}
    if asked.get("type") != "json_schema" or not isinstance(schema.get("schema"), dict):
        raise body.wrong(
            "response_format", "a type: text, json_object, or json_schema with json_schema.schema"
        )
    return Guide("json_schema", json.dumps(schema["schema"]))


def _structured(body: Body, name: str) -> Guide | None:
    """A schema, an expression, or texts, as vLLM takes them."""
    value = body.values.get(name)
    if value is None:
        return None
    kind = name.removeprefix("guided_")
    if kind == "regex":
        return Guide("regex", body.text(name) or "")
    if kind == "choice":
        return Guide("choice", json.dumps(body.texts(name, most=MOST_TEXTS)))
    return Guide("json_schema", value if isinstance(value, str) else json.dumps(value))


def _top_logprobs(body: Body) -> int:
    """How many of the likeliest tokens are told with each; completions say it in ``logprobs``."""
    count = body.integer("top_logprobs", 0, MOST_TOP) or 0
    value = body.values.get("logprobs", False)
    if not isinstance(value, bool):
        return max(count, body.integer("logprobs", 0, MOST_TOP) or 0)
    if count and not value:
        raise invalid(f"top_logprobs={count}: expected logprobs=true with it", "top_logprobs")
    return count


def _biases(body: Body) -> tuple[tuple[int, float], ...]:
    """Token ids, which are texts in JSON, and what is added to their logits."""
    given = body.table("logit_bias") or {}
    _check_count("logit_bias", given, MOST_BIASES)
    if not all(name.isascii() and name.isdecimal() and len(name) < 11 for name in given):
        raise body.wrong("logit_bias", "token ids and a number for each")
    biases = Body(given)
    return tuple((int(name), biases.number(name) or 0.0) for name in biases.values)


def conversation(body: Body) -> Conversation:
    """What the messages of a body say. Raises Problem 400 or RequestError."""
    given = body.values.get("messages")
    if isinstance(given, list):
        _check_count("messages", given, MOST_TEXTS)
    return conversation_of(given, body.text("query"), wire=True)


def _check_count(name: str, given: Sized, most: int) -> None:
    if len(given) > most:
        raise invalid(f"{name} has {len(given)} entries: expected at most {most}", name)


def _documents(body: Body) -> tuple[Passage, ...] | None:
    """Texts, lists of token ids, or objects with a text and perhaps a title and an id."""
    if "documents" not in body:
        return None
    given = body.values["documents"]
    if not isinstance(given, list):
        raise body.wrong("documents", "a list of texts, or of objects with a text")
    _check_count("documents", given, MOST_TEXTS)
    return tuple(_document(f"documents[{i}]", one) for i, one in enumerate(given))


def _document(what: str, value: Any) -> Passage:
    if isinstance(value, dict):
        fields = Body(value)
        text, title = fields.values.get("text"), fields.values.get("title", "")
        name = fields.values.get("id")
        if isinstance(name, int) and not isinstance(name, bool):
            name = str(name)
        if not (is_text(text) and isinstance(title, str) and isinstance(name, str | None)):
            raise invalid(
                f"{what}={reprlib.repr(value)}: expected a text, and perhaps a title and an id",
                "documents",
            )
        return Passage(text, title, name)
    if not is_text(value):
        raise invalid(
            f"{what}={reprlib.repr(value)}: expected a text, token ids, or an object with a text",
            "documents",
        )
    return Passage(value)


def is_text(value: Any) -> TypeGuard[Text]:
    """Is it a text, or a list of token ids?"""
    return isinstance(value, str) or is_ids(value)
