"""Prompt templates as data: a prefix, what surrounds each chunk, and the final block.

Tokens are the interface: every part is tokenised on its own and the ids are concatenated; joined
text is never tokenised again, so a chunk has the same ids in every prompt. Special tokens are
recognised in the template's own text only, never in documents or questions.
"""

import dataclasses
import datetime
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np
import xxhash

from jaxrag.base.errors import ConfigError, TokenizerError
from jaxrag.base.installed import config_names, config_path
from jaxrag.base.tables import build, read_toml
from jaxrag.base.types import HostArray
from jaxrag.models.text.tokenizer import PROMPT_FILE, Tokenizer

ChunkOrder = Literal["best_first", "best_last", "document"]
BARE = "bare"  # of configs/templates: for chunks that are pasted into prompts of others
DEFAULT_TEMPLATE = "turborag"  # where a model's tokenizer has its markers, and no chat template

_FIELD = re.compile(r"\{(text|title|question)\}")
_LIKE_A_FIELD = re.compile(r"\{[A-Za-z_]+\}")  # {0} and JSON are text
_MARKER = re.compile(r"<\|[^<>|\s]+\|>")  # a special token, by its looks
_CHUNKS_HERE = "\u241e"  # stands for the chunks while a chat template is rendered
_ANSWER_HERE = "\u241f"  # for an answer
_NEXT = "\n"  # between an answer and what follows it, without a chat template
_SYSTEM_END = "\n\n"
_DATE = datetime.datetime(2024, 7, 26)  # that Llama 3 prints where it gets none


class OfDocument(Protocol):
    """A chunk that knows its place."""

    @property
    def document_id(self) -> str:
        """The document it was cut from."""

    @property
    def chunk_index(self) -> int:
        """Its place among the document's chunks."""


@dataclasses.dataclass(frozen=True)
class QuestionIds:
    """One question of a conversation as it is in the prompt; int32 ids.

    Attributes:
      before: from the answer before it to its chunks; of the first question the prefix.
      final: from its chunks to its answer.
      question: where its own tokens stand in ``final``: the first, and one past them.
    """

    before: HostArray
    final: HostArray
    question: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class PromptTemplate:
    """One prompt format.

    Attributes:
      name: how results and the knowledge base call it.
      prefix: text before the chunks; encoded once.
      chunk: around every chunk; holds {text} and may hold {title}.
      final: after the chunks; holds {question}.
      chat: render prefix and final block as one user message of the model's chat template, dated
        as ``_DATE``: the text before the chunks is part of what they are stored under, and must not
        be another tomorrow.
      chunk_order: retrieved chunks by descending ("best_first") or ascending ("best_last") score;
        or "document": those of one document together in their order, the document with the best
        chunk first, so that "she" follows her name and a correction what it corrects.
    """

    name: str
    prefix: str
    chunk: str
    final: str
    chat: bool = False
    chunk_order: ChunkOrder = "best_first"

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            kind = bool if name == "chat" else str
            if not isinstance(value, kind):
                raise ConfigError(
                    f"template {self.name!r}: {name}={value!r}, expected a {kind.__name__}"
                )
        for field, needed, allowed in (
            ("prefix", None, set()),
            ("chunk", "text", {"text", "title"}),
            ("final", "question", {"question"}),
        ):
            found = _FIELD.findall(getattr(self, field))
            if (needed and found.count(needed) != 1) or set(found) - allowed:
                raise ConfigError(
                    f"template {self.name!r}: {field} must hold "
                    + (f"{{{needed}}} once" if needed else "no placeholder")
                    + f", got {getattr(self, field)!r}"
                )
            unknown = set(_LIKE_A_FIELD.findall(getattr(self, field))) - {
                f"{{{name}}}" for name in ("text", "title", "question")
            }
            if unknown:
                raise ConfigError(
                    f"template {self.name!r}: {field} holds {min(unknown)}, which nothing fills; "
                    "the placeholders are {text}, {title} and {question}: write others without "
                    "braces"
                )
        if self.chunk_order not in get_args(ChunkOrder):
            raise ConfigError(
                f"template {self.name!r}: chunk_order={self.chunk_order!r}, expected one of "
                f"{', '.join(get_args(ChunkOrder))}"
            )

    def prefix_ids(self, tokenizer: Tokenizer) -> HostArray:
        """Token ids before the chunks, led by BOS or what else the model expects: int32 [P]."""
        return _led(tokenizer, self._around_chunks(tokenizer)[0][0])

    def chunk_ids(self, tokenizer: Tokenizer, text_ids: HostArray, title: str = "") -> HostArray:
        """Token ids of one chunk as it is in the prompt: int32 [T]."""
        return _fill(self.chunk, tokenizer, {"text": text_ids, "title": title})

    def final_ids(self, tokenizer: Tokenizer, question: str) -> HostArray:
        """Token ids of the final block: int32 [T]."""
        return _fill(self._around_chunks(tokenizer)[0][1], tokenizer, {"question": question})

    def conversation(
        self, tokenizer: Tokenizer, questions: Sequence[str], system: str = ""
    ) -> list[QuestionIds]:
        """Token ids around the chunks of every question; answers stand between, as they are.

        What the caller would have the system say stands behind the chunks of the first question:
        before them it would be part of what they are stored under.
        """
        asked = []
        around = self._around_chunks(tokenizer, len(questions))
        for place, (question, (before, after)) in enumerate(zip(questions, around, strict=True)):
            first = not place
            opening = _led(tokenizer, before) if first else _fill(before, tokenizer, {})
            said = tokenizer.encode(system + _SYSTEM_END if first and system else "")
            start = len(said) + len(_fill(after.partition("{question}")[0], tokenizer, {}))
            final = np.concatenate((said, _fill(after, tokenizer, {"question": question})))
            span = start, start + len(tokenizer.encode(question))
            asked.append(QuestionIds(opening, final.astype(np.int32), span))
        return asked

    def split_marker(self, tokenizer: Tokenizer) -> str | None:
        """What is wrong where a marker of the prompt, ``<|...|>``, is no single token; else None.

        Spelled in pieces it marks nothing: its pieces are ordinary text, and many.
        """
        [(before, after)] = self._around_chunks(tokenizer)
        for marker in _MARKER.findall(before + self.chunk + after):
            pieces = len(tokenizer.encode(marker, special=True))
            if pieces != 1:
                return (
                    f"template {self.name!r} holds {marker}, which is no token of this model's "
                    f"tokenizer but {pieces} pieces of text"
                )
        return None

    def check_markers(self, tokenizer: Tokenizer) -> None:
        """Refuse a tokenizer that cuts markers of the prompt into pieces: TokenizerError."""
        wrong = self.split_marker(tokenizer)
        if wrong is not None:
            raise TokenizerError(
                f"{wrong}; choose another template, such as plain, or chat for a model with a chat "
                "template, or add the token to tokenizer and embedding and train with it"
            )

    def parts(self, tokenizer: Tokenizer) -> tuple[tuple[str, str], ...]:
        """The text of prefix, chunk and final block as a model reads them, with placeholders.

        Raises TokenizerError as ``prefix_ids`` does.
        """
        [(before, after)] = self._around_chunks(tokenizer)
        leading = tokenizer.decode(tokenizer.leading_ids, skip_special=False)
        before = before if before.startswith(leading) else leading + before
        return ("prefix", before), ("chunk", self.chunk), ("final block", after)

    def arrange[C: OfDocument](self, found: Sequence[C]) -> list[C]:
        """Retrieved chunks, given best first, in the order of the prompt."""
        if self.chunk_order == "best_last":
            return list(found[::-1])
        if self.chunk_order == "document":
            place: dict[str, int] = {}
            for chunk in found:
                place.setdefault(chunk.document_id, len(place))
            return sorted(found, key=lambda chunk: (place[chunk.document_id], chunk.chunk_index))
        return list(found)

    def to_dict(self) -> dict[str, Any]:
        """Plain form; ``template_from_dict`` is its inverse."""
        return dataclasses.asdict(self)

    def toml(self) -> str:
        """The text of a file that ``template_named`` reads; its name is the file's."""
        values = {name: value for name, value in self.to_dict().items() if name != "name"}
        # A string of JSON is one of TOML; so are its true and false.
        texts = {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()}
        return "".join(f"{name} = {text}\n" for name, text in texts.items())

    @property
    def digest(self) -> str:
        """Of what it does to a prompt; its name does not count."""
        return xxhash.xxh3_64_hexdigest(self.toml().encode())

    def _around_chunks(self, tokenizer: Tokenizer, questions: int = 1) -> list[tuple[str, str]]:
        """Of every question the text before its chunks, and the text from there to its answer."""
        if not self.chat:
            return [(self.prefix, self.final), *[(_NEXT, self.final)] * (questions - 1)]
        if not tokenizer.has_chat_template:
            raise TokenizerError(
                f"template {self.name!r} has chat = true, but the tokenizer has no chat template; "
                f"choose another template, such as plain, or add chat_template.jinja to the model "
                f"directory"
            )
        asked = {"role": "user", "content": _CHUNKS_HERE + self.final}
        first = {"role": "user", "content": self.prefix + _CHUNKS_HERE + self.final}
        answered = {"role": "assistant", "content": _ANSWER_HERE}
        try:
            text = tokenizer.render_chat([first, *[answered, asked] * (questions - 1)], now=_DATE)
        except TokenizerError as error:
            raise TokenizerError(f"{error}; choose another template, such as plain") from None
        before, *pieces = text.split(_CHUNKS_HERE)
        around = []
        for piece in pieces:
            after, _, following = piece.partition(_ANSWER_HERE)
            around.append((before, after))
            before = following
        answers = [piece.count(_ANSWER_HERE) for piece in pieces]
        if answers != [1] * (questions - 1) + [0] or any(
            after.count("{question}") != 1 for _, after in around
        ):
            what = "the user's message once" if questions == 1 else "every message once, in order"
            raise TokenizerError(
                f"the model's chat template does not repeat {what}, so template {self.name!r} "
                "cannot place its chunks; choose another, such as plain"
            )
        return around


def _led(tokenizer: Tokenizer, text: str) -> HostArray:
    """Token ids of the beginning of a prompt, led by BOS or what else the model expects."""
    ids = tokenizer.encode(text, special=True)
    leading = tokenizer.leading_ids
    if not np.array_equal(ids[: len(leading)], leading):
        ids = np.concatenate((leading, ids))
    return ids.astype(np.int32)


def _fill(pattern: str, tokenizer: Tokenizer, values: dict[str, Any]) -> HostArray:
    """Tokenise a pattern piece by piece; values are text without special tokens, or ids."""
    parts: list[HostArray] = []
    for index, piece in enumerate(_FIELD.split(pattern)):
        if index % 2:
            value = values[piece]
            parts.append(tokenizer.encode(value) if isinstance(value, str) else value)
        elif piece:
            parts.append(tokenizer.encode(piece, special=True))
    return np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, np.int32)


TEMPLATES: dict[str, PromptTemplate] = {
    # TurboRAG section 3.3. The document markers are single tokens in models trained for it and
    # ordinary text in others.
    "turborag": PromptTemplate(
        name="turborag",
        prefix=(
            "You are an accurate and reliable AI assistant capable of answering questions by "
            "referencing external documents. Please note that the external documents may not "
            "always be related to the question. The documents are as follows:\n"
        ),
        chunk="<|doc_start|>{text}<|doc_end|>\n",
        final=(
            "If the information in the documents contain the correct answer, you will provide an "
            "accurate response. If the documents do not contain the answer, you will refuse to "
            "answer.\nQuestion: {question}\n"
        ),
    ),
    # Block-Attention Fig. 3; passages in ascending order of retrieval score (section 3).
    "block_attention": PromptTemplate(
        name="block_attention",
        prefix=(
            "You are an intelligent AI assistant. Please answer questions based on the user's "
            "instructions. Below are some reference documents that may help you in answering the "
            "user's question.\n"
        ),
        chunk="- Title: {title}\n{text}\n",
        final=(
            "\n\nPlease write a high-quality answer for the given question using only the provided "
            "search documents (some of which might be irrelevant).\nQuestion: {question}\n"
        ),
        chunk_order="best_last",
    ),
    # One user message of the model's own chat template: for instruction-tuned models.
    "chat": PromptTemplate(
        name="chat",
        prefix="Answer the question from the passages below.\n\n",
        chunk="[{title}]\n{text}\n\n",
        final=(
            "Question: {question}\nGive a short answer. If the passages do not contain it, say so."
        ),
        chat=True,
        chunk_order="best_last",
    ),
    # No instruction: for base models and for measurements.
    "plain": PromptTemplate(
        name="plain", prefix="", chunk="{text}\n\n", final="Question: {question}\nAnswer:"
    ),
}


def template_from_dict(values: dict[str, Any], where: str) -> PromptTemplate:
    """A template from plain values; unknown or missing keys raise ConfigError."""
    return build(PromptTemplate, values, where)


def template_named(name: str) -> PromptTemplate:
    """A built-in template or one of configs/templates by name, or from a TOML file by path."""
    if name in TEMPLATES:
        return TEMPLATES[name]
    path = config_path(name, "templates")
    if path is None:
        names = (*TEMPLATES, *config_names("templates"))
        raise ConfigError(
            f"template {name!r}: expected one of {', '.join(names)} or the path of a .toml file"
        )
    return template_from_dict({"name": path.stem, **read_toml(path)}, name)


def suited_template(tokenizer: Tokenizer | None, wanted: PromptTemplate) -> PromptTemplate:
    """The prompt format of a model that brings none: its chat template, where it has one.

    Else ``wanted``, unless the tokenizer cuts its markers into pieces: then "plain".
    """
    if tokenizer is None:
        return wanted
    if tokenizer.has_chat_template:
        return wanted if wanted.chat else TEMPLATES["chat"]
    if wanted.chat or wanted.split_marker(tokenizer) is None:
        return wanted
    return TEMPLATES["plain"]


def read_prompt(directory: str | Path) -> PromptTemplate | None:
    """The template that a model directory brings in ``prompt.toml``; None when there is none.

    The file is a template's TOML file like any other. Raises ConfigError for one that is not.
    """
    path = Path(directory) / PROMPT_FILE
    return template_named(str(path)) if path.is_file() else None


def write_prompt(directory: str | Path, template: PromptTemplate) -> None:
    """Write ``prompt.toml``: every field but the name, which belongs to the file."""
    values = {key: value for key, value in template.to_dict().items() if key != "name"}
    # JSON strings and booleans are TOML too, but for DEL, which JSON leaves as it is.
    lines = (f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items())
    text = "".join(lines).replace("\x7f", "\\u007f")
    (Path(directory) / PROMPT_FILE).write_text(text, encoding="utf-8")
