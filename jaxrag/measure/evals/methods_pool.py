"""What `jaxrag eval methods` asks: knowledge bases of chunks, and the prompts made of them.

Either every question is asked over all chunks of its own sample, which share one knowledge base
with those of all others; or the chunks of a sample are a knowledge base of their own, and what a
question is asked over is what a search in it finds.
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence

from jaxrag.base.errors import RequestError
from jaxrag.base.types import HostArray
from jaxrag.engine.sampling_params import SamplingParams
from jaxrag.library.documents import Document
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.measure.evals.options import MethodsOptions
from jaxrag.measure.evals.scoring import Written
from jaxrag.reuse.encode import encoder_named
from jaxrag.reuse.methods import Method
from jaxrag.serve.ask import Ask
from jaxrag.serve.questions import ReadyQuestion, Settings, prepare, resolve

PoolNeighbours = tuple[tuple[HostArray, ...], ...]  # of every chunk of a sample


@dataclasses.dataclass(frozen=True)
class Pool:
    """The knowledge bases, and what is asked of them. Make one with ``open_pool``.

    Attributes:
      kbs: one of all samples, or one a sample.
      retrieve: chunks that a question is asked over; None: all of its sample.
    """

    kbs: tuple[KnowledgeBase, ...]
    written: Written
    retrieve: int | None
    _neighbours: dict[tuple[str, int], PoolNeighbours] = dataclasses.field(default_factory=dict)
    _chosen: dict[tuple[int, str], Sequence[int]] = dataclasses.field(default_factory=dict)

    def asked(self, method: Method) -> Iterator[tuple[Settings, list[ReadyQuestion]]]:
        """Every question with its chunks' neighbours.

        In their order, those of one knowledge base together with what they have in common.
        """
        samples = list(enumerate(self.written.samples))
        alone = len(self.kbs) > 1
        for group in [[sample] for sample in samples] if alone else [samples]:
            settings = self._settings(self._kb(group[0][0]), method)
            yield (
                settings,
                [
                    self._ready(settings, number, question.question)
                    for number, sample in group
                    for question in sample.questions
                ],
            )

    def _kb(self, sample: int) -> KnowledgeBase:
        return self.kbs[sample if len(self.kbs) > 1 else 0]

    def _settings(self, kb: KnowledgeBase, method: Method) -> Settings:
        """What all questions of a cell have in common."""
        tokens, template = self.written.answer_tokens, self.written.template
        ask = Ask(method=method, template=template, max_new_tokens=tokens)
        return resolve(ask, kb=kb, neighbours="prompt")  # ``_ready`` puts those of the pool there

    def _ready(self, settings: Settings, number: int, question: str) -> ReadyQuestion:
        sample, chosen = self.written.samples[number], self._choose(number, question)
        texts = [sample.chunks[i] for i in chosen]
        one = prepare(settings, question, texts, SamplingParams())
        names = settings.method.encoders
        seeing = [name for name in names if encoder_named(name).sees_neighbours]
        neighbours = None
        if seeing:
            of_all = self._behind(seeing[0], number)
            neighbours = tuple(of_all[i] for i in chosen)
        prompt = dataclasses.replace(one.prompt, neighbours=neighbours)
        return dataclasses.replace(one, prompt=prompt)

    def _choose(self, number: int, question: str) -> Sequence[int]:
        """The chunks that a question of a sample is asked over, in the order of its prompt.

        Of those that are found, chunks about one person stand together, as they were written.
        """
        if self.retrieve is None:
            return range(len(self.written.samples[number].chunks))
        if (number, question) not in self._chosen:
            subjects = self.written.samples[number].subjects
            hits = self._kb(number).search(question, k=self.retrieve, mode="bm25")
            ranked = [int(hit.document_id.rpartition("-")[2]) for hit in hits]
            best: dict[str, int] = {}
            for i in ranked:
                best.setdefault(subjects[i], len(best))
            placed = sorted(ranked, key=lambda i: (best[subjects[i]], i))
            self._chosen[number, question] = placed
        return self._chosen[number, question]

    def _behind(self, encoder: str, sample: int) -> PoolNeighbours:
        """What each chunk of a sample was encoded behind, as token ids."""
        if (encoder, sample) not in self._neighbours:
            kb, count = self._kb(sample), len(self.written.samples[sample].chunks)
            ids = [kb.chunks.of_document(_name(sample, i))[0] for i in range(count)]
            found = kb.neighbours_of(ids, encoder, self.written.template)
            self._neighbours[encoder, sample] = tuple(found)
        return self._neighbours[encoder, sample]


def open_pool(
    options: MethodsOptions,
    written: Written,
    methods: Sequence[Method],
    folder: str,
    progress: bool,
) -> Pool:
    """Every chunk as a document of its own, encoded in every way that a method wants.

    Where chunks are searched for, each has the name of whom it is about as its title, as a page of
    an encyclopedia has: a chunk that says "she" would never be found. Raises RequestError for a
    template that would write it into the prompt.
    """
    if options.retrieve and "{title}" in written.template.chunk:
        raise RequestError(
            f"--retrieve {options.retrieve}: template {written.template.name!r} writes titles into "
            f"the chunks, which would tell who {'she'!r} is; use one without {{title}}"
        )
    encoders = dict.fromkeys(encoder for method in methods for encoder in method.encoders)
    sees = any(encoder_named(encoder).sees_neighbours for encoder in encoders)
    documents = [
        [
            Document(_name(number, i), text, title=sample.subjects[i] if options.retrieve else "")
            for i, text in enumerate(sample.chunks)
        ]
        for number, sample in enumerate(written.samples)
    ]
    if options.retrieve is None:
        documents = [[document for of_sample in documents for document in of_sample]]
    kbs = []
    for number, group in enumerate(documents):
        kb = KnowledgeBase.open(
            pathlib.Path(folder) / f"kb{number}",
            written.model,
            template=written.template,
            chunk_tokens=max(len(chunk) for ids in written.ids for chunk in ids.chunks),
            overlap=0,
            chunk_by="tokens",
            encoders=list(encoders),
            neighbours=options.neighbours if sees else None,
            similar_by="bm25" if sees else None,
        )
        kb.add(group, progress=progress)
        kbs.append(kb)
    return Pool(tuple(kbs), written, options.retrieve)


def _name(sample: int, chunk: int) -> str:
    return f"{sample:05}-{chunk:02}"
