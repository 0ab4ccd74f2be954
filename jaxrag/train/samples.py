"""Rows of training data to token ids, in the published shapes.

- ``{"messages": [{"role", "content"}, ...]}``: dialogue that ends with the assistant's answer.
- ``{"blocks": [...], "response": ...}``: prompt text that is cut into blocks already, the last one
  global (Block-Attention's released data; its "prompt" is the joined text and is not read).
- ``{"prefix"?, "chunks": [...], "question", "answers": [...]}``, or ``"questions": [{"question",
  "answers"}, ...]`` over the same chunks. A chunk is text or ``{"title", "text"}``. An empty list
  of answers asks for the refusal (TurboRAG section 3.3).

Each part is tokenised on its own and the ids are concatenated, as when questions are answered.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import ConfigError
from jaxrag.base.types import HostArray
from jaxrag.models.text.prompts import PromptTemplate
from jaxrag.models.text.tokenizer import Tokenizer
from jaxrag.tasks.synthetic import Sample

SEPARATORS = ("\n\n", "---", "===", "\n\t", "\n")
MAX_BLOCKS = 14  # "fewer than 15"
LONG_DIALOGUE = 12  # messages from which on each is a block of its own


class BadRow(ValueError):
    """A row that cannot be trained on; the message is the reason, the reader adds where."""


@dataclasses.dataclass(frozen=True)
class Final:
    """A question and the response to it: int32 ids of each."""

    question: HostArray
    response: HostArray

    def __len__(self) -> int:
        return len(self.question) + len(self.response)


@dataclasses.dataclass(frozen=True)
class TrainSample:
    """One set of documents and the questions on it, which do not see each other; int32 ids."""

    prefix: HostArray
    chunks: tuple[HostArray, ...]
    finals: tuple[Final, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of a packed row that the sample takes."""
        return self.num_shared + sum(map(len, self.finals))

    @property
    def num_shared(self) -> int:
        """Tokens before the questions."""
        return len(self.prefix) + sum(map(len, self.chunks))

    @property
    def num_positions(self) -> int:
        """Length of the longest prompt with its response."""
        return self.num_shared + max(map(len, self.finals))


@dataclasses.dataclass(frozen=True)
class SampleWriter:
    """Tokenises rows for one model.

    Attributes:
      tokenizer: of the model.
      template: of rows that bring documents.
      end_id: ends every response.
      response_start: text before every response.
      refusal: the response where ``answers`` is an empty list.
    """

    tokenizer: Tokenizer
    template: PromptTemplate
    end_id: int
    response_start: str
    refusal: str

    def write(self, row: Mapping[str, Any]) -> TrainSample:
        """The sample of a row in one of the shapes above. Raises BadRow."""
        if "messages" in row:
            return self._dialogue(row["messages"])
        if "blocks" in row:
            return self._blocks(row)
        if "chunks" in row:
            return self._documents(row)
        raise BadRow(f"keys {', '.join(sorted(row))}: expected messages, blocks or chunks")

    def write_synthetic(self, sample: Sample) -> TrainSample:
        """The sample of a generated one."""
        pairs = [(question.question, question.answer) for question in sample.questions]
        return self._sample(sample.prefix, [("", text) for text in sample.chunks], pairs)

    def _documents(self, row: Mapping[str, Any]) -> TrainSample:
        asked = row.get("questions")
        if asked is None:
            asked = [{"question": row.get("question"), "answers": row.get("answers")}]
        if not isinstance(asked, Sequence) or isinstance(asked, str) or not asked:
            raise BadRow("questions: expected a list of objects with question and answers")
        pairs = []
        for item in asked:
            if not isinstance(item, Mapping):
                raise BadRow("questions: expected objects with question and answers")
            pairs.append((_text(item, "question"), self._answer(item)))
        chunks = row["chunks"]
        if not isinstance(chunks, Sequence) or isinstance(chunks, str):
            raise BadRow("chunks: expected a list")
        parts = []
        for chunk in chunks:
            if isinstance(chunk, Mapping):
                parts.append((str(chunk.get("title") or ""), _text(chunk, "text")))
            else:
                parts.append(("", _text({"chunks": chunk}, "chunks")))
        return self._sample(row.get("prefix") or "", parts, pairs)

    def _answer(self, item: Mapping[str, Any]) -> str:
        answers = item.get("answers")
        if isinstance(answers, str):
            answers = [answers]
        if not isinstance(answers, Sequence) or not all(isinstance(a, str) for a in answers):
            raise BadRow("answers: expected a list of texts")
        return answers[0] if len(answers) else self.refusal

    def _sample(
        self, prefix: str, chunks: Sequence[tuple[str, str]], pairs: Sequence[tuple[str, str]]
    ) -> TrainSample:
        tokenizer, template = self.tokenizer, self.template
        if not isinstance(prefix, str):
            raise BadRow(f"prefix={prefix!r:.40}: expected a text")
        if prefix:
            template = dataclasses.replace(template, prefix=prefix)
        texts = tokenizer.encode_batch([text for _, text in chunks])
        return TrainSample(
            prefix=template.prefix_ids(tokenizer),
            chunks=tuple(
                template.chunk_ids(tokenizer, ids, title)
                for ids, (title, _) in zip(texts, chunks, strict=True)
            ),
            finals=tuple(
                Final(template.final_ids(tokenizer, question), self._response(answer))
                for question, answer in pairs
            ),
        )

    def _response(self, text: str) -> HostArray:
        """Ids of a response with its end, which is not repeated where the text has it."""
        if not text.strip():
            raise BadRow("the response is empty")
        ids = self.tokenizer.encode(self.response_start + text)
        return np.append(ids, np.int32(self.end_id)).astype(np.int32)

    def _blocks(self, row: Mapping[str, Any]) -> TrainSample:
        blocks = row["blocks"]
        if not isinstance(blocks, Sequence) or isinstance(blocks, str) or not blocks:
            raise BadRow("blocks: expected a list of texts, the last one with the question")
        return self._prompt([_text({"blocks": block}, "blocks") for block in blocks], row)

    def _prompt(self, blocks: Sequence[str], row: Mapping[str, Any]) -> TrainSample:
        """Blocks that already are prompt text: special tokens in them are meant."""
        ids = [self.tokenizer.encode(block, special=True) for block in blocks]
        leading = self.tokenizer.leading_ids
        if not np.array_equal(ids[0][: len(leading)], leading):
            ids[0] = np.concatenate((leading, ids[0])).astype(np.int32)
        response = _text(row, "response", empty="the response is empty")
        end = self.tokenizer.decode([self.end_id], skip_special=False)
        final = Final(ids[-1], self._response(response.removesuffix(end)))
        none = np.zeros(0, np.int32)
        return TrainSample(ids[0] if len(ids) > 1 else none, tuple(ids[1:-1]), (final,))

    def _dialogue(self, messages: Any) -> TrainSample:
        if not isinstance(messages, Sequence) or not all(isinstance(m, Mapping) for m in messages):
            raise BadRow("messages: expected a list of objects with role and content")
        turns = [(_text(m, "role"), _text(m, "content", empty=None)) for m in messages]
        if len(turns) < 2 or turns[-1][0] != "assistant" or turns[-2][0] != "user":
            raise BadRow("messages: expected the last two to be of user and assistant")
        prompt = _rendered(self.tokenizer, turns[:-1])
        return self._prompt(split_chat(prompt), {"response": turns[-1][1]})


def response_end(model: ModelConfig, tokenizer: Tokenizer, where: object) -> int:
    """The id that ends every response; ConfigError, naming ``where``, when there is none."""
    ends = [*model.eos_ids, *tokenizer.eos_ids]
    if not ends:
        raise ConfigError(f"{where}: no end-of-sequence token, so no response can end")
    return ends[0]


def _rendered(tokenizer: Tokenizer, turns: Sequence[tuple[str, str]]) -> list[str]:
    """Prompt text of every message, the last one with what asks for the answer."""
    if not tokenizer.has_chat_template:
        texts = [f"<|{role}|>\n{content}\n" for role, content in turns]
        return [*texts[:-1], texts[-1] + "<|assistant|>\n"]
    messages = [{"role": role, "content": content} for role, content in turns]
    texts, before = [], ""
    for count in range(1, len(messages) + 1):
        # A template may refuse a lone system message, so pieces are cut where a user speaks.
        if messages[count - 1]["role"] == "system":
            continue
        last = count == len(messages)
        text = tokenizer.render_chat(messages[:count], add_generation_prompt=last)
        if not text.startswith(before):
            raise BadRow("the model's chat template changes earlier messages; cannot cut it")
        texts.append(text[len(before) :])
        before = text
    return texts


def _text(row: Mapping[str, Any], key: str, empty: str | None = "") -> str:
    """row[key] as text; ``empty`` is the reason an empty one is refused with, None allows it."""
    value = row.get(key)
    if not isinstance(value, str):
        raise BadRow(f"{key}={value!r:.40}: expected a text")
    if empty is not None and not value.strip():
        raise BadRow(empty or f"{key} is empty")
    return value


def split_chat(messages: Sequence[str]) -> list[str]:
    """Blocks of a prompt, whose concatenation is the prompt; the last one is global.

    ``messages`` are the prompt texts of the turns, the last one the user's question. A single turn
    is cut itself; of several, the last is the global block and those before it are cut.
    """
    if len(messages) == 1:
        return _merge(_cut(messages[0]), MAX_BLOCKS)
    *before, question = messages
    if len(messages) >= LONG_DIALOGUE:
        return [*before, question]
    return [*_merge(_cut("".join(before)), MAX_BLOCKS - 1), question]


def _cut(text: str) -> list[str]:
    """Pieces of a text, each with the separator that ends it."""
    for separator in SEPARATORS:
        *closed, last = text.split(separator)
        if closed:
            pieces = [piece + separator for piece in closed]
            return [*pieces, last] if last else pieces
    return [text]


def _merge(pieces: list[str], most: int) -> list[str]:
    """Join the two neighbours that are smallest together until at most ``most`` are left.

    Pieces of white space alone are no blocks: they join the piece before them.
    """
    blocks: list[str] = []
    for piece in pieces:
        if blocks and not (piece.strip() and blocks[-1].strip()):
            blocks[-1] += piece
        else:
            blocks.append(piece)
    while len(blocks) > most:
        sizes = [len(a) + len(b) for a, b in itertools.pairwise(blocks)]
        at = sizes.index(min(sizes))
        blocks[at : at + 2] = [blocks[at] + blocks[at + 1]]
    return blocks
