"""Rows to train on over the documents of a knowledge base: `jaxrag kb questions`.

A row has a question, its answers, and the passage that they stand in among the others that a search
finds for the question. Documents fall to one of two sides by their id: no text of a document whose
questions are held out stands in a row.
"""

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from jaxrag.base.errors import RequestError, disk_errors
from jaxrag.engine.sampling_params import SamplingParams
from jaxrag.library.catalog import Hit
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.measure.evals.gate import answered
from jaxrag.measure.evals.metrics import holds, normalised
from jaxrag.measure.evals.options import RowsOptions
from jaxrag.measure.evals.own import Probe, probes_of
from jaxrag.models.text.progress import progress_bar
from jaxrag.models.text.prompts import PromptTemplate
from jaxrag.serve.answer_files import AnswerFile
from jaxrag.serve.ask import Ask
from jaxrag.serve.conversation import Passage
from jaxrag.serve.question_files import QuestionFile
from jaxrag.serve.questions import Settings, prepare, resolve

_FULL = "full_attention"
_DEEPER = 4  # times as many chunks are searched as a row has, for some are on the other side
_WORDS = 12  # of an answer that is short

_WRITE = PromptTemplate(
    name="write a question",
    prefix="Here is a passage.\n\n",
    chunk="{text}\n\n",
    final="{question}",
    chat=True,
)
_TASK = (
    "Write one question that this passage answers, and its short answer in the words of the "
    "passage. The question names whom or what it is about, so that it can be understood without "
    "the passage. Write two lines and nothing else:\nQuestion: ...\nAnswer: ..."
)
_WRITTEN = re.compile(
    r"^\W*question\W*[:\uff1a]\W*(?P<question>\S.*?)[*_ ]*$"
    r"\s*^\W*answer\W*[:\uff1a][*_ ]*(?P<answer>\S.*?)[*_ ]*$",
    re.IGNORECASE | re.MULTILINE,
)

NO_QUESTION = "the model wrote no question with a short answer"
NOT_IN_PASSAGE = "the answer does not stand in the passage, or stands in the question"
DOUBLE = "the question was there already"
NO_SOURCE = 'no document that the search finds holds the answer; name it in "sources"'
BOTH_SIDES = "some of its documents are held out, others are not"
NO_ANSWER = "the model's own answer was empty or cut off"
REASONS = (NO_QUESTION, NOT_IN_PASSAGE, DOUBLE, NO_SOURCE, BOTH_SIDES, NO_ANSWER)


@dataclasses.dataclass(frozen=True)
class Made:
    """A question and where its answer stands.

    Attributes:
      number: its place in the order of the run, from 1; in both files, ascending.
      chunks: that a row must hold.
    """

    number: int
    question: str
    answers: tuple[str, ...]
    chunks: tuple[Hit, ...]

    @property
    def sources(self) -> list[str]:
        """Ids of its documents."""
        return list(dict.fromkeys(hit.document_id for hit in self.chunks))


@dataclasses.dataclass(frozen=True)
class MadeRows:
    """What a run wrote, and how many questions it left out by reason.

    ``documents`` are those that the rows ask about.
    """

    rows: int
    documents: int
    held_out: int
    dropped: dict[str, int]


@dataclasses.dataclass(frozen=True)
class RowFiles:
    """The rows and the questions that are held out. Make one with ``open``.

    Attributes:
      done: the last number that either holds.
      seen: the questions of both, normalised.
    """

    rows: AnswerFile
    held_out: AnswerFile
    done: int
    seen: set[bytes] = dataclasses.field(default_factory=set)

    @classmethod
    @contextlib.contextmanager
    def open(
        cls, rows: Path, held_out: Path, options: RowsOptions, *, resume: bool = False
    ) -> Iterator[Self]:
        """Both files, to write to.

        Raises RequestError for one file twice, or one that holds lines already without ``resume``;
        ConfigError for lines that are no rows, or were made with other options.
        """
        if rows.absolute() == held_out.absolute():
            raise RequestError(f"{rows}: rows and held-out questions need a file each; name two")
        made_with = dataclasses.asdict(dataclasses.replace(options, passages=None))
        with AnswerFile(rows, made_with) as first, AnswerFile(held_out, made_with) as second:
            files = cls(first, second, max(map(int, first.done | second.done), default=0))
            for path in (rows, held_out):
                for line in path.read_text(encoding="utf-8").splitlines():
                    if not resume:
                        raise RequestError(
                            f"{path} holds lines already; pass --resume to go on, or name another "
                            "file"
                        )
                    files.is_new(json.loads(line).get("question", ""))
            yield files

    def is_new(self, question: str) -> bool:
        """Whether it was not asked before; it is from now on."""
        digest = hashlib.blake2b(normalised(question).encode(), digest_size=8).digest()
        known = digest in self.seen
        self.seen.add(digest)
        return not known


def make_rows(
    kb: KnowledgeBase,
    files: RowFiles,
    options: RowsOptions,
    given: QuestionFile | None = None,
    *,
    progress: bool = False,
) -> MadeRows:
    """Write rows and held-out questions over a knowledge base that was opened with its model.

    Args:
      given: questions with their answers; None: the model writes them.
      progress: show how far it is, on stderr.

    Raises RequestError: no model, one without a chat format that is to write, a bad line of
    ``given``, or not one question that could be used; StoreError where the disk refuses.
    """
    if kb.model is None:
        raise RequestError(f"{kb.path} was opened without its model; open it with model=")
    maker = _Maker(kb, files, options)
    if given is None:
        total, made = maker.written()
    else:
        total, made = maker.taken(given)
    with progress_bar(total, "questions", "question", shown=progress, done=files.done) as bar:
        for some in made:
            with disk_errors(files.rows.path):
                maker.put([question for question in some if isinstance(question, Made)])
            maker.dropped.update(question for question in some if isinstance(question, str))
            bar.update(len(some))
    return maker.report()


class _Maker:
    """One run."""

    def __init__(self, kb: KnowledgeBase, files: RowFiles, options: RowsOptions) -> None:
        self.kb, self.files, self.options = kb, files, options
        self.rows = self.held_out = 0
        self.asked: set[str] = set()
        self.dropped: collections.Counter[str] = collections.Counter()

    def written(self) -> tuple[int, Iterator[list[Made | str]]]:
        """How many passages there are, and what the model asks of them, some at a time."""
        tokenizer = self.kb.model.text_tokenizer()  # type: ignore[union-attr]
        if not tokenizer.has_chat_template:
            raise RequestError(
                f"{self.kb.model_path}: no chat format, so it cannot be told to write questions; "
                "ingest with an instruct model, or pass --questions FILE"
            )
        documents = self.kb.documents()
        ends = np.cumsum([document.num_chunks for document in documents], dtype=np.int64)
        count = int(ends[-1]) if len(ends) else 0
        order = np.random.default_rng(self.options.seed).permutation(count)
        order = order[: self.options.passages]
        settings = self._settings(_WRITE)

        def asked() -> Iterator[list[Made | str]]:
            rest = enumerate(order[self.files.done :], self.files.done + 1)
            for some in itertools.batched(rest, self.options.batch_size):
                passages = []
                for number, place in some:
                    at = int(np.searchsorted(ends, place, side="right"))
                    within = int(place - (ends[at - 1] if at else 0))
                    found = self.kb.chunks_of(documents[at].id, [within])
                    passages += [(number, hit) for hit in found]
                yield self._write(settings, passages)

        return len(order), asked()

    def taken(self, given: QuestionFile) -> tuple[int, Iterator[list[Made | str]]]:
        """How many questions the file has, and what becomes of them, some at a time."""
        probes = probes_of(given, self.kb)[: self.options.passages]

        def found() -> Iterator[list[Made | str]]:
            rest = list(enumerate(probes, 1))[self.files.done :]
            for some in itertools.batched(rest, self.options.batch_size):
                yield [self._taken(number, probe) for number, probe in some]

        return len(probes), found()

    def put(self, made: Sequence[Made]) -> None:
        """Write questions where they belong."""
        kept: list[tuple[Made, list[Hit]]] = []
        for question in made:
            sides = {self._is_held_out(name) for name in question.sources}
            if len(sides) > 1:
                self.dropped[BOTH_SIDES] += 1
            elif not self.files.is_new(question.question):
                self.dropped[DOUBLE] += 1
            elif sides == {True}:
                self.files.held_out.write([_plain(question)])
                self.held_out += 1
            else:
                kept.append((question, self._around(question)))
        for question, chunks in self._answered(kept):
            shown = [{"title": hit.title, "text": hit.text} for hit in chunks]
            self.files.rows.write([{**_plain(question), "chunks": shown}])
            self.rows += 1
            self.asked.update(question.sources)

    def report(self) -> MadeRows:
        dropped = {reason: self.dropped[reason] for reason in REASONS}
        if not (self.rows or self.held_out or self.files.done):
            reasons = "; ".join(f"{count}: {why}" for why, count in dropped.items() if count)
            raise RequestError(
                f"{self.kb.path}: no question could be used ({reasons or 'no passages'}); pass "
                "--questions FILE, or take a larger instruct model"
            )
        return MadeRows(self.rows, len(self.asked), self.held_out, dropped)

    def _settings(self, template: PromptTemplate | None) -> Settings:
        ask = Ask(method=_FULL, template=template, max_new_tokens=self.options.max_new_tokens)
        return resolve(ask, kb=self.kb)

    def _write(self, settings: Settings, passages: Iterable[tuple[int, Hit]]) -> list[Made | str]:
        some = list(passages)
        ready = [
            prepare(settings, _TASK, [Passage(hit.text)], self._sampling(number))
            for number, hit in some
        ]
        results = answered(ready, self.options.batch_size)
        return [
            made_of(number, result.text, hit)
            for (number, hit), result in zip(some, results, strict=True)
        ]

    def _sampling(self, number: int) -> SamplingParams:
        seed = random.Random(f"{self.options.seed} {number}").getrandbits(32)
        return SamplingParams(temperature=self.options.temperature, seed=seed)

    def _taken(self, number: int, probe: Probe) -> Made | str:
        """A question that was given, with the chunks of its documents that a row must hold."""
        sources = probe.sources
        if not sources:
            found = self.kb.search(probe.question.text, _DEEPER * self.options.k)
            sources = tuple(it.document_id for it in found if holds(it.text, probe.answers))[:1]
        chunks = [hit for name in sources for hit in self.kb.chunks_of(name)]
        if not chunks:
            return NO_SOURCE
        first = sorted(chunks, key=lambda hit: not holds(hit.text, probe.answers))
        kept = first[: self.options.k]
        return Made(number, probe.question.text, probe.answers, tuple(kept))

    def _is_held_out(self, document_id: str) -> bool:
        key = hashlib.blake2b(f"{self.options.seed} {document_id}".encode(), digest_size=8).digest()
        return int.from_bytes(key) < self.options.held_out_share * 2**64

    def _around(self, made: Made) -> list[Hit]:
        """The chunks of a row in the order of the prompt, which the seed decides."""
        found = self.kb.search(made.question, _DEEPER * self.options.k)
        own = {hit.chunk_id for hit in made.chunks}
        others = [
            hit
            for hit in found
            if hit.chunk_id not in own and not self._is_held_out(hit.document_id)
        ]
        chosen = [*made.chunks, *others][: self.options.k]
        random.Random(f"{self.options.seed} {made.number}").shuffle(chosen)
        return self.kb.template.arrange(chosen)

    def _answered(self, kept: list[tuple[Made, list[Hit]]]) -> Iterator[tuple[Made, list[Hit]]]:
        """Rows with the answers that they are trained on."""
        if not self.options.own_answers or not kept:
            yield from kept
            return
        settings = self._settings(None)
        ready = [
            prepare(settings, question.question, [Passage(hit.text, hit.title) for hit in chunks])
            for question, chunks in kept
        ]
        results = answered(ready, self.options.batch_size)
        for (question, chunks), result in zip(kept, results, strict=True):
            if result.finish_reason == "stop" and result.text.strip():
                yield dataclasses.replace(question, answers=(result.text.strip(),)), chunks
            else:
                self.dropped[NO_ANSWER] += 1


def made_of(number: int, text: str, passage: Hit) -> Made | str:
    """The question that the model wrote on a passage, or why it is none to use."""
    written = _WRITTEN.search(text)
    if written is None or len(written["answer"].split()) > _WORDS:
        return NO_QUESTION
    question, answer = written["question"].strip(), written["answer"].strip()
    if not holds(passage.text, [answer]) or holds(question, [answer]):
        return NOT_IN_PASSAGE
    return Made(number, question, (answer,), (passage,))


def _plain(made: Made) -> dict[str, Any]:
    return {
        "id": made.number,
        "question": made.question,
        "answers": list(made.answers),
        "sources": made.sources,
    }
