"""Plain prompts: messages as the model's chat template writes them, with pasted passages as blocks.

What is read as a block is a function of the messages and the rules (`models.text.passages`). All
else is computed in place, over everything that precedes it:

    prefix | turn: frame, system, words before | block | turn: words between | block | final
    BOS      exact, kept in the pool             KV     exact                  KV      question
"""

import dataclasses
import datetime
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxrag.base.errors import RequestError, TokenizerError
from jaxrag.base.installed import __version__
from jaxrag.base.types import HostArray
from jaxrag.engine.request import Prompt
from jaxrag.engine.reuse import KVTier, PartReuse
from jaxrag.kv.store.keys import fingerprint
from jaxrag.models.model import Model
from jaxrag.models.text.passage_rules import PassageRules, passage_rules
from jaxrag.models.text.passages import MOST_CHARACTERS, TextPiece, cut
from jaxrag.models.text.tokenizer import Tokenizer
from jaxrag.models.text.verbatim import OPENED, Framing, framed
from jaxrag.reuse.encode import encoder_named
from jaxrag.reuse.methods import Method
from jaxrag.serve.ask import Ask
from jaxrag.serve.compatibility import chosen_primer
from jaxrag.serve.conversation import Conversation, FoundChunk, Source
from jaxrag.serve.history import FOLDED, JOINT, folded

TextIds = Callable[[str], HostArray]  # ids of a text, int32 [T]

SeenAt = Literal["first sight", KVTier]

_MESSAGE = "messages["  # what sources call a message, with its place behind
LEAST_REQUESTS = 50  # with passages, over which a gate of plain prompts says something
_PROMPT = "prompt"  # and a prompt without messages
_ASKED = re.compile(
    r"\b(?:question|query)\b[^\n\w]{0,10}:\s*[^\s#]|\u95ee\u9898[:\uff1a]\s*\S", re.IGNORECASE
)
_HEAD = 400  # characters of a first block that begins its message
_LONG_QUESTION = 200  # characters
_QUESTION_MARKS = ("?", "\uff1f")
_rules = functools.lru_cache(maxsize=16)(passage_rules)


@dataclasses.dataclass(frozen=True)
class _Said:
    """Token ids of a piece, and what they are: a block, or computed.

    Attributes:
      ids: int32 [T].
      source: of a block.
      ends_answer: the answer of the assistant ends here.
      asks: it is of the last message of the user.
    """

    ids: HostArray
    source: Source | None = None
    ends_answer: bool = False
    asks: bool = False


def is_verbatim(ask: Ask, model: Model, talk: Conversation) -> bool:
    """Whether messages are put as the model's chat template writes them: nothing else is asked for.

    Raises RequestError where passages are to be found in what is not.
    """
    chat = model.tokenizer is not None and model.tokenizer.has_chat_template
    own = ask.template is not None or ask.earlier_turns == "blocks"
    if talk.prompt is not None or (talk.messages and chat and not own):
        return True
    if ask.plain == "passages" and talk.messages:
        raise RequestError(
            "plain='passages' needs a model with a chat template, and neither template= nor "
            "earlier_turns='blocks'; use plain='off'"
        )
    if talk.framing != OPENED:
        raise RequestError(
            "tools need a model with a chat template, and neither template= nor "
            "earlier_turns='blocks', as chat_template_kwargs, continue_final_message and "
            "add_generation_prompt do; name tools in a message, and leave the others out"
        )
    return False


def rules_for(ask: Ask, method: Method) -> PassageRules | None:
    """How passages are found; None where none is, by ``ask`` or for a method that reads no blocks.

    Raises RequestError for a method whose chunks see their neighbours, as nobody knows a pasted
    passage's, or that computes misses in place, as answers would depend on what is stored.
    """
    if ask.plain == "off" or method.encoder is None:
        return None
    if any(encoder_named(name).sees_neighbours for name in method.encoders):
        raise RequestError(
            f"method {method.name!r} reads KV that has seen neighbours; pasted passages have none: "
            "choose turborag, block_attention, cacheblend or epic"
        )
    if method.misses != "encode":
        raise RequestError(
            f"misses={method.misses!r}: what is read as a block would depend on what is stored; "
            "plain prompts take misses='encode'"
        )
    return _rules(ask.passage_rules)


@dataclasses.dataclass(frozen=True)
class PlainSpan:
    """A passage of a message that was read as a block.

    Attributes:
      message: its place among the messages; 0 in a prompt that has none.
      start: first character in the message's content.
      end: one past the last character.
      tokens: of it.
      how: where its KV was found: "pool", "host" or "store"; "first sight": it was encoded.
    """

    message: int
    start: int
    end: int
    tokens: int
    how: SeenAt


def spans(sources: Sequence[Source], reuse: Iterable[PartReuse]) -> list[PlainSpan]:
    """What became of the passages of a plain prompt, by the account of its answer."""
    rows = [row for row in reuse if row.part.startswith("chunk")]
    return [
        PlainSpan(
            message_place(source),
            source.start,
            source.end,
            row.tokens,
            row.where or "first sight",
        )
        for source, row in zip(sources, rows, strict=True)
    ]


def plain_subject(model: Model, ask: Ask, method: Method) -> dict[str, Any]:
    """What decides how well plain prompts are read, JSON-able: the day that a chat prints is none.

    What becomes of leading parts and how answers attend is left out: there KV is exact.
    """
    values = method.settings
    for other in ("prefix_cache", "decode", "primer"):
        del values[other]
    primer = chosen_primer(None, method)
    rules, tokenizer = rules_for(ask, method), model.text_tokenizer()
    subject: dict[str, Any] = {
        "model": model.fingerprint,
        "tokenizer": tokenizer.digest,
        "chat": tokenizer.chat_templates,
        "rules": None if rules is None else dataclasses.asdict(rules),
        "method": values,
    }
    if primer is not None:
        held = primer.to_dict()
        del held["name"]
        subject["primer"] = held.get("passages", held)
    return dict(json.loads(json.dumps(subject)))


def answer_fingerprint(
    model: Model, ask: Ask, method: Method, sizes: Mapping[str, int | float]
) -> str:
    """Identity of all that a plain prompt's answer depends on but the request, 16 hex digits.

    Args:
      model: weights, tokenizer and chat template; with the day where the template may print it.
      ask: the rules by which passages are found.
      method: how they are read.
      sizes: of the engine's programs, by name, and what a request has that says nothing.
    """
    tokenizer = model.text_tokenizer()
    dated = any("strftime_now" in text for text in tokenizer.chat_templates.values())
    settings = {
        "version": __version__,
        "subject": plain_subject(model, ask, method),
        "method": method.settings,
        "day": datetime.date.today().isoformat() if dated else None,
        "sizes": dict(sizes),
    }
    return fingerprint(json.loads(json.dumps(settings)))[:16]


def verbatim_prompt(
    ask: Ask, model: Model, method: Method, talk: Conversation, encode: TextIds | None
) -> tuple[Prompt, list[FoundChunk], tuple[str, ...]]:
    """The prompt of what is put as it is, its blocks, and what is to be said of it.

    ``encode`` as ``plain_prompt`` has it. Messages that the template does not take are folded.
    """
    rules, tokenizer = rules_for(ask, method), model.text_tokenizer()
    if talk.prompt is not None:
        return *continued_prompt(tokenizer, talk.prompt, rules), ()
    try:
        return *plain_prompt(tokenizer, talk.messages, rules, encode, talk.framing), ()
    except TokenizerError:
        rows = folded(talk.messages)
        messages = [row for row, _ in rows]
        if messages == list(talk.messages):
            raise
        prompt, members = plain_prompt(tokenizer, messages, rules, encode, talk.framing)
    placed = [
        dataclasses.replace(member, source=_before_folding(member.source, rows, talk.messages))
        for member in members
    ]
    return prompt, placed, (FOLDED,)


def _before_folding(
    source: Source, rows: Sequence[tuple[Any, list[int]]], messages: Sequence[Mapping[str, Any]]
) -> Source:
    """A block of a message that is several, in the one where it begins."""
    start, places = source.start, rows[message_place(source)][1]
    for place in places:
        size = len(messages[place]["content"]) + len(JOINT)
        if start < size:
            break
        start -= size
    return dataclasses.replace(
        source,
        document_id=f"{_MESSAGE}{place}]",
        start=start,
        end=start + source.end - source.start,
    )


def message_place(source: Source) -> int:
    """Among messages, of the one that a block is of; 0 in a prompt that has none."""
    name = source.document_id
    return 0 if name == _PROMPT else int(name.removeprefix(_MESSAGE)[:-1])


def continued_prompt(
    tokenizer: Tokenizer, text: str, rules: PassageRules | None
) -> tuple[Prompt, list[FoundChunk]]:
    """The prompt that is a text and nothing else, and its blocks in order.

    Special tokens count where they are spelled: who sends a whole prompt writes its frame.
    """
    pieces = (
        _Said(
            tokenizer.encode(text[piece.start : piece.end], special=True),
            _source(_PROMPT, text, piece, 0) if piece.block else None,
        )
        for piece in text_pieces(text, rules, asks=True)
    )
    first = next(pieces, _Said(np.zeros(0, np.int32)))
    ids = _without_leading(tokenizer, first.ids) if first.source is None else first.ids
    return _laid_out(tokenizer, [dataclasses.replace(first, ids=ids), *pieces], rules)


def plain_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    rules: PassageRules | None,
    encode: TextIds | None = None,
    framing: Framing = OPENED,
) -> tuple[Prompt, list[FoundChunk]]:
    """The prompt of a conversation, and its blocks in order.

    A source names its message as its document, and where it stands in the message's content.

    Args:
      messages: roles and contents, texts.
      rules: how passages are found; None: none is, as in more than ``MOST_CHARACTERS``.
      encode: gives the ids of contents and their pieces; None: the tokenizer does.
      framing: what the template is given beside them.

    Raises TokenizerError as ``framed`` does.
    """
    if sum(len(message["content"]) for message in messages) > MOST_CHARACTERS:
        rules = None
    pieces = list(_pieces(tokenizer, messages, rules, encode or tokenizer.encode, framing))
    return _laid_out(tokenizer, pieces, rules)


def _laid_out(
    tokenizer: Tokenizer, pieces: list[_Said], rules: PassageRules | None
) -> tuple[Prompt, list[FoundChunk]]:
    """Pieces as a prompt: computed ones between blocks are turns, those behind all are its end."""
    if rules is not None and sum(len(piece.ids) for piece in pieces if piece.source) < rules.worth:
        pieces = [dataclasses.replace(piece, source=None) for piece in pieces]
    chunks, turns, members = list[HostArray](), list[int](), list[FoundChunk]()
    now, question = list[HostArray](), None

    def size() -> int:
        return sum(map(len, now))

    def turn(ids: HostArray) -> None:
        if len(ids):
            turns.append(len(chunks))
            chunks.append(ids)

    for text_piece in pieces:
        if text_piece.source is not None:
            turn(_joined(now))
            now, question = [], None
            chunks.append(text_piece.ids)
            members.append(FoundChunk(text_piece.source, "", text_piece.ids, bare=True))
            continue
        if text_piece.asks:
            question = size(), size() + len(text_piece.ids)
        now.append(text_piece.ids)
        if text_piece.ends_answer:  # its last token was never run when it was generated
            ids = _joined(now)
            turn(ids[:-1])
            now, question = [ids[-1:]], None
    leading = tokenizer.leading_ids
    prompt = Prompt(leading, tuple(chunks), _joined(now), question=question).with_turns(turns)
    return prompt, members


def _pieces(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    rules: PassageRules | None,
    encode: TextIds,
    framing: Framing,
) -> Iterator[_Said]:
    """Everything behind the leading tokens, piece by piece."""
    asking = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    for number, part in enumerate(framed(tokenizer, messages, framing)):
        if part.spelled:
            yield _Said(encode(part.text))
        elif part.message is None:
            yield _Said(_frame_ids(tokenizer, part.text, first=number == 0))
        elif messages[part.message]["role"] == "assistant":
            yield _Said(encode(part.text), ends_answer=True)
        else:
            asks = part.message == asking
            before = messages[part.message]["content"].index(part.text)  # that a template strips
            for piece in text_pieces(part.text, rules, asks):
                text = part.text[piece.start : piece.end]
                name = f"{_MESSAGE}{part.message}]"
                source = _source(name, part.text, piece, before) if piece.block else None
                last = asks and piece.end == len(part.text)
                yield _Said(encode(text), source, asks=last)


def text_pieces(text: str, rules: PassageRules | None, asks: bool) -> list[TextPiece]:
    """The pieces of a content; the last one that may ask is computed, whatever it is."""
    if rules is None:
        return [TextPiece(0, len(text), block=False)]
    pieces = cut(text, rules)
    if asks and pieces and pieces[-1].block and not _asked_before(text, pieces):
        pieces[-1] = dataclasses.replace(pieces[-1], block=False)
    return pieces


def _asked_before(text: str, pieces: Sequence[TextPiece]) -> bool:
    """Whether the question is before the passages: a label or its mark says so; the last has none.

    Beside a mark, the last has to be long for a question.
    """
    first = next(piece for piece in pieces if piece.block)
    head = text[: first.start or min(first.end, _HEAD)]
    last = pieces[-1]
    asked = _ASKED.search(head) is not None or (
        last.end - last.start > _LONG_QUESTION
        and any(line.rstrip().endswith(_QUESTION_MARKS) for line in head.splitlines())
    )
    return asked and first is not pieces[-1] and not text.rstrip().endswith(_QUESTION_MARKS)


def _source(name: str, text: str, piece: TextPiece, before: int) -> Source:
    """A block of a text; ``before``: characters that are left out before the text."""
    start, end = piece.start, piece.end
    return Source(name, 0, None, None, text[start:end], start=before + start, end=before + end)


def _frame_ids(tokenizer: Tokenizer, text: str, first: bool) -> HostArray:
    """Ids of the template's own text; the prefix has what leads a prompt."""
    ids = tokenizer.encode(text, special=True)
    return _without_leading(tokenizer, ids) if first else ids


def _without_leading(tokenizer: Tokenizer, ids: HostArray) -> HostArray:
    """The first ids of a prompt, without those that lead it, which are its prefix."""
    leading = tokenizer.leading_ids
    return ids[len(leading) :] if np.array_equal(ids[: len(leading)], leading) else ids


def _joined(parts: Sequence[HostArray]) -> HostArray:
    return np.concatenate([np.zeros(0, np.int32), *parts]).astype(np.int32)
