"""A question made ready: the settings of a run, and one question with its chunks as token ids."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxrag.base.errors import RequestError
from jaxrag.base.tables import require_kind
from jaxrag.base.types import HostArray
from jaxrag.engine.citing import check_cited
from jaxrag.engine.engine import engine_of
from jaxrag.engine.request import Prompt, Request, check_length
from jaxrag.engine.sampling_params import SamplingParams
from jaxrag.kv.store import KVStore
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.library.knowledge_base.neighbours import Placed
from jaxrag.library.knowledge_base.passages import PassageCorpus
from jaxrag.library.options import NeighboursFrom
from jaxrag.library.retrieve.base import searched_text
from jaxrag.library.retrieve.filters import Filter
from jaxrag.models.model import Model
from jaxrag.models.text.prompts import BARE, PromptTemplate, QuestionIds, template_named
from jaxrag.reuse.decode import rule_from
from jaxrag.reuse.encode import Primer
from jaxrag.reuse.methods import Method, method_named
from jaxrag.serve.ask import Ask
from jaxrag.serve.compatibility import (
    check_backend,
    chosen_primer,
    chosen_template,
    default_method,
    for_no_chunks,
    gated,
    renamed,
    unplaced,
    untuned,
)
from jaxrag.serve.conversation import (
    Conversation,
    FoundChunk,
    Passage,
    Source,
    Text,
    laid_out,
    numbered,
)
from jaxrag.serve.given import (
    behind_given,
    check_neighbours,
    given_chunk,
    on_neighbours,
    seeing_encoders,
)
from jaxrag.serve.history import FOLDED
from jaxrag.serve.output import PLAINLY, AnswerText
from jaxrag.serve.plain import TextIds, is_verbatim, verbatim_prompt
from jaxrag.serve.readable import check_readable
from jaxrag.serve.words import some_of


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all questions of a run have in common. Make one with ``resolve``.

    Those of a ``ReadyQuestion`` have what is not about it turned off.

    Attributes:
      kb: that is searched; None: none.
      store: where the KV of chunks is kept.
      method: with what ``ask`` and the gate of the knowledge base say of it.
      primer: what its chunks are encoded behind; None where they see none.
      neighbours: where those of chunks that are given come from, for encoders that see some:
        "corpus", the knowledge base; other passages; "prompt", its own others.
      encode: gives the ids of what messages hold; None: the tokenizer does.
      shown: how their text is.
      check_cancelled: asked between two texts; raises where nobody waits for the answer any more.
    """

    ask: Ask
    model: Model
    kb: KnowledgeBase | None
    store: KVStore
    method: Method
    template: PromptTemplate
    notes: tuple[str, ...] = ()
    primer: Primer | None = None
    neighbours: NeighboursFrom | PassageCorpus = "corpus"
    encode: TextIds | None = dataclasses.field(default=None, repr=False)
    shown: AnswerText = PLAINLY
    check_cancelled: Callable[[], None] = dataclasses.field(default=lambda: None, repr=False)

    def one_by_one[It](self, texts: Iterable[It]) -> Iterator[It]:
        """Texts that are worked on in turn, as long as somebody waits."""
        for text in texts:
            self.check_cancelled()
            yield text


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ReadyQuestion(Request):
    """One question as the engine is asked it, and what its answer needs. Made by ``prepare``.

    Attributes:
      settings: that hold for it; their notes are on all that happened so far.
      found: the chunks of its prompt but for turns, in order, as they are cited.
      retrieve_seconds: what finding them took.
      prepare_again: makes it ready anew, as what it was made from may have left the knowledge base.
    """

    settings: Settings
    found: tuple[FoundChunk, ...]
    retrieve_seconds: float
    prepare_again: "Callable[[], ReadyQuestion]"

    @property
    def sources(self) -> list[Source]:
        """What a result says of its chunks."""
        return [chunk.source for chunk in self.found]

    @property
    def retrieved(self) -> bool:
        """Whether its chunks are those of the knowledge base."""
        return self.settings.kb is not None and None not in (chunk.chunk_id for chunk in self.found)

    @property
    def abstains(self) -> bool:
        """Whether the model is not asked, as the filter or the least score left no chunk."""
        nothing = all(chunk.chunk_id is None for chunk in self.found)
        return self.settings.kb is not None and nothing and self.settings.ask.unanswerable != "ask"

    @property
    def plain(self) -> bool:
        """Whether its chunks are passages that were found in its messages."""
        return self.settings.ask.plain == "passages"

    @property
    def chunk_ids(self) -> tuple[int, ...]:
        """Of its chunks that were retrieved."""
        return tuple(chunk.chunk_id for chunk in self.found if chunk.chunk_id is not None)

    @property
    def content_ids(self) -> tuple[str, ...]:
        """Of the neighbours that these were encoded behind."""
        return tuple(dict.fromkeys(name for chunk in self.found for name in chunk.behind))

    @property
    def is_current(self) -> bool:
        """Whether all that it is made from is still in the knowledge base."""
        kb = self.settings.kb
        return kb is None or kb.holds(self.chunk_ids, self.content_ids)


def resolve(
    ask: Ask,
    *,
    kb: KnowledgeBase | None = None,
    model: Model | None = None,
    store: KVStore | None = None,
    neighbours: NeighboursFrom | PassageCorpus = "corpus",
) -> Settings:
    """Method, model, template and store that all questions share; checked, as far as that is known.

    Without a knowledge base, KV of documents is kept in ``store``; None: the engine's memory.
    ``neighbours`` are those of documents and blocks, as of ``Settings``.

    A method that is named, with no ratio, runs at the ratio that the gate of the knowledge base
    found; a Method says its ratio itself.

    Raises RequestError, and TokenizerError when stop strings are given to a model without text.
    """
    opened = "a KnowledgeBase, as KnowledgeBase.open(DIR, model=...) gives it"
    require_kind("kb", kb, (KnowledgeBase,), opened)
    require_kind("model", model, (Model,), "a Model, as load_model(DIR) gives it")
    check_neighbours(neighbours)
    if kb is not None and model is not None and kb.model is not model:
        raise RequestError("model= differs from the knowledge base's model; pass only kb=")
    model = model if kb is None else kb.model
    if model is None:
        raise RequestError("no model: pass model=, or open the knowledge base with one")
    method = _method(ask, model, kb)
    if ask.stop:
        model.text_tokenizer()
    if ask.cite != "no":
        check_cited(model)
    if ask.where is not None:
        Filter.parse(ask.where)
        if kb is None:
            raise RequestError("where= chooses documents of a knowledge base; pass kb= with it")
    for name in ("search_mode", "min_score", "groups"):
        if getattr(ask, name) is not None and kb is None:
            raise RequestError(f"{name}= is about a knowledge base; pass kb= with it")
    template, notes = chosen_template(ask.template, kb, model, method)
    if kb is not None and not isinstance(ask.method, Method) and ask.recompute_ratio is None:
        method, gate = gated(kb, method, template)
        notes += gate
    notes += (*renamed(method, template), *untuned(model, kb, method, template))
    notes += unplaced(model, method)
    check_backend(model, method)
    method.check(model.config)
    method.check_placement(model.config, model.placement, generates=ask.max_new_tokens > 1)
    method.decode.check_mesh(model.config, model.mesh, model.placement)
    primer = chosen_primer(kb, method)
    kept = kb.store if kb is not None else store or engine_of(model).memory
    return Settings(ask, model, kb, kept, method, template, notes, primer, neighbours)


def _method(ask: Ask, model: Model, kb: KnowledgeBase | None) -> Method:
    """The method that is named, or the default, with what is said of it beside."""
    named = ask.method
    method = default_method(model, kb) if named is None else method_named(named)
    if ask.recompute_ratio is not None:
        method = method.with_ratio(ask.recompute_ratio)
    changes: dict[str, Any] = {
        "misses": ask.misses,
        "prefix_cache": ask.prefix_cache,
        "decode": None if ask.decode is None else rule_from(ask.decode),
    }
    changes = {name: value for name, value in changes.items() if value is not None}
    return dataclasses.replace(method, **changes)


def prepare(
    settings: Settings,
    question: Text | Conversation,
    documents: Sequence[Text | Passage] | None = None,
    sampling: SamplingParams | None = None,
) -> ReadyQuestion:
    """Retrieve the chunks, or take the documents, and turn every part into token ids.

    Runs nothing on the device. Documents are before the first question of a conversation; what is
    retrieved, before the question that it was found for, and once. Words that the tokenizer lacks
    are named in the notes. Greedy without ``sampling``.

    Raises:
      RequestError: a question that cannot be served: empty, of words that the model cannot read
        (one of them, if its vocabulary is a list of words; all of them, if it is one of sub-words),
        longer than the model's context, larger than the cache, with neither documents nor a
        knowledge base, or with documents whose neighbours nobody knows.
      TokenizerError: text for a model without a tokenizer.
    """
    start = time.perf_counter()
    sampling = sampling or SamplingParams()
    if sampling.bad_words and settings.model.tokenizer is not None:
        sampling = sampling.spelled(settings.model.tokenizer.encode)
    sampling.check_ids(settings.model.config.vocab_size, settings.model.eos_ids)
    grammar = settings.model.grammar(sampling.guide)  # refused here
    talk = question if isinstance(question, Conversation) else Conversation((question,))
    ask, model = settings.ask, settings.model
    alone = documents is None and settings.kb is None and not len(ask.blocks)
    verbatim = alone and is_verbatim(ask, model, talk)
    check_readable(ask, model, talk, documents, verbatim)
    if _as_blocks(settings) and settings.method.encoder is None:
        raise RequestError(
            f"earlier_turns='blocks': method {settings.method.name!r} computes the whole prompt "
            "and reads no blocks; leave it out, or choose a method that reuses chunks"
        )
    if alone and talk is not question:
        raise RequestError("no knowledge base and no documents to answer from; give one of them")
    notes = [*settings.notes, *talk.notes, *(grammar.notes if grammar else ())]
    if ask.stop and sampling.guide is not None:
        notes.append("stop: not looked for, as the answer is of a form, whose end is its own")
    chunks = _retrieved(settings, talk, documents, notes)
    retrieve_seconds = time.perf_counter() - start
    if not any(chunks) and (settings.kb is not None or documents is not None):
        notes += _on_nothing(settings, documents is None)
    if verbatim:
        prompt, members, more = verbatim_prompt(ask, model, settings.method, talk, settings.encode)
        notes += more
    else:
        prompt, members = _laid_out(settings, talk, chunks)
    prepare_again = functools.partial(prepare, settings, question, documents, sampling)
    if not any(chunks) and not (verbatim and members):
        settings = dataclasses.replace(settings, method=for_no_chunks(settings.method, ask))
    method, kb, kept = settings.method, settings.kb, ask.prefix_cache
    if verbatim and ask.plain == "passages" and kept is None:
        kept = False  # bit for bit the same whatever was asked before
    bare = verbatim or not isinstance(talk.questions[-1], str)
    primer = _primer_tokens(settings, prompt, bare)
    if settings.primer is not None and settings.primer.around is not None:
        prompt = prompt.in_packets(model.config.vocab_size, *settings.primer.around)
    keeps = talk.keeps and kept is not False and not _as_blocks(settings)
    notes += _unknown(settings, talk, documents, prompt)
    notes += _on_turns(settings, talk, keeps, verbatim)
    check_length(model, prompt, ask.max_new_tokens)
    if not verbatim and ask.plain != "off":
        ask = dataclasses.replace(ask, plain="off")
    if documents is not None and ask.unanswerable != "ask":
        ask = dataclasses.replace(ask, unanswerable="ask")
    members = numbered(members, chunks[-1])
    prompt, members = _behind_others(settings, members, prompt)
    if prompt.neighbours is not None and any(member.chunk_id is None for member in members):
        notes += on_neighbours(settings.neighbours, settings.kb)
    ready = ReadyQuestion(
        prompt,
        settings.store,
        # leading parts are kept where that is exact whatever the pool holds
        dataclasses.replace(method, prefix_cache=True) if keeps and not method.encoder else method,
        ask.max_new_tokens,
        sampling=sampling,
        eos_ids=model.eos_ids,
        indexing=None if kb is None else kb.indexing,
        keeps=keeps,
        cited=ask.cite != "no",
        primer=primer,
        settings=dataclasses.replace(settings, ask=ask, notes=tuple(notes)),
        found=tuple(members),
        retrieve_seconds=retrieve_seconds,
        prepare_again=prepare_again,
    )
    engine_of(model).check_fits(ready)
    return ready


def _as_blocks(settings: Settings) -> bool:
    """Whether earlier turns are chunks, each for itself."""
    return settings.ask.earlier_turns == "blocks"


def _retrieved(
    settings: Settings,
    talk: Conversation,
    documents: Sequence[Text | Passage] | None,
    notes: list[str],
) -> list[list[FoundChunk]]:
    """The chunks of every question: given, or of a search, each once; ``notes`` gets its notes."""
    found: list[list[FoundChunk]] = [[] for _ in talk.questions]
    if documents is not None:
        given = enumerate(settings.one_by_one(documents))
        found[0] = [given_chunk(f"documents[{i}]", text, settings.model) for i, text in given]
    elif settings.kb is not None:
        seen: set[int | None] = set()
        searches = (*talk.questions[:-1], talk.query or talk.questions[-1])
        for place, asked in enumerate(settings.one_by_one(searches)):
            if isinstance(asked, str) and not asked.strip():
                continue
            chunks, why = _searched(settings, settings.kb, asked)
            notes += (note for note in why if note not in notes)
            found[place] = [chunk for chunk in chunks if chunk.chunk_id not in seen]
            seen.update(chunk.chunk_id for chunk in found[place])
    return found


def _searched(
    settings: Settings, kb: KnowledgeBase, question: Text
) -> tuple[list[FoundChunk], tuple[str, ...]]:
    """The chunks that the knowledge base finds for a question, and what it says of the search."""
    if not isinstance(question, str):
        raise RequestError("retrieval needs the question as text; pass documents= with token ids")
    ask = settings.ask
    hits = kb.search(
        question, ask.k, where=ask.where, mode=ask.search_mode, min_score=ask.min_score,
        groups=ask.groups,
    )  # fmt: skip
    numbers = {h.chunk_id: number for number, h in enumerate(hits, 1)}
    return [
        FoundChunk(
            Source(
                h.document_id,
                h.chunk_index,
                h.file,
                h.score,
                h.text,
                h.page,
                h.start,
                h.end,
                number=numbers[h.chunk_id],
            ),
            h.title,
            h.ids,
            h.chunk_id,
        )
        for h in settings.template.arrange(hits)
    ], hits.notes


def _on_nothing(settings: Settings, searched: bool) -> Iterator[str]:
    """Notes on a question that no chunk was found for, or given."""
    ask, kb = settings.ask, settings.kb
    what = "was asked without any"
    if searched and ask.unanswerable == "abstain":
        what = "was not asked; unanswerable='ask' (--unanswerable ask) asks it without any"
    yield f"no chunk was found for the question; it {what}"
    if ask.min_score is not None:
        yield f"only chunks with a score of {ask.min_score:g} or more count"
    if ask.groups is not None:
        yield "only documents count that the reader's groups may read"
    elif ask.where is not None and kb is not None:
        yield from (f"where: {why}" for why in kb.why_nothing(ask.where))


def _laid_out(
    settings: Settings, talk: Conversation, found: list[list[FoundChunk]]
) -> tuple[Prompt, list[FoundChunk]]:
    """The prompt as token ids, blocks before all chunks; and its chunks but for turns."""
    if talk.has_tools:
        raise RequestError(
            "messages hold calls of tools or what tools say, which the model's own chat template "
            "writes: send them without a knowledge base, documents and template"
        )
    model, template = settings.model, settings.template
    own = enumerate(settings.one_by_one(settings.ask.blocks))
    blocks = [given_chunk(f"blocks[{i}]", block, model) for i, block in own]
    found = [[*(dataclasses.replace(block, bare=True) for block in blocks), *found[0]], *found[1:]]
    texts = [text for text in talk.questions if isinstance(text, str)]
    none = np.zeros(0, np.int32)
    if texts:
        tokenizer = model.text_tokenizer()
        asked = template.conversation(tokenizer, texts, talk.system)
    else:  # token ids are put as they are: no template, as there may be no tokenizer
        ids = [given_chunk("question", question, model).ids for question in talk.questions]
        asked = [QuestionIds(none, question_ids, (0, len(question_ids))) for question_ids in ids]
    answers = [
        given_chunk("an answer", it, model).ids if not isinstance(it, str) or it.strip() else none
        for it in settings.one_by_one(talk.answers)
    ]

    def wrap(chunk: FoundChunk) -> HostArray:
        if chunk.bare or not texts:
            return chunk.ids
        return template.chunk_ids(tokenizer, chunk.ids, chunk.title)

    def shown(ids: HostArray) -> str:
        return tokenizer.decode(ids) if texts else ""

    return laid_out(asked, answers, found, wrap, settings.ask.earlier_turns, shown)


def _on_turns(settings: Settings, talk: Conversation, keeps: bool, verbatim: bool) -> Iterator[str]:
    """Notes on what a method makes of a conversation."""
    method = settings.method
    if not verbatim and any(
        message["role"] != "system" and other["role"] == "system"
        for message, other in itertools.pairwise(talk.messages)
    ):
        yield FOLDED
    if talk.system and not verbatim:
        yield (
            "the system message stands behind the chunks of the first question: before them it "
            "would be part of what they are stored under"
        )
    if not talk.answers:
        return
    if _as_blocks(settings):
        yield (
            "earlier turns are read as blocks, each for itself: an approximation, which the model "
            "has to be trained for"
        )
    elif keeps and method.chunk_attention is not None:
        what = "attends to chunks in a way of its own"
        yield f"earlier turns were computed again with this question: {method.name} {what}"
    elif keeps and (method.recomputes or method.misses == "in_place"):
        what = "chooses tokens by the question" if method.recomputes else "computes gaps in place"
        yield f"earlier turns were computed again with this question: {method.name} {what}"


def _unknown(
    settings: Settings,
    talk: Conversation,
    documents: Sequence[Text | Passage] | None,
    prompt: Prompt,
) -> Iterator[str]:
    """Notes on what becomes the unknown token; none for a question of token ids."""
    question = talk.questions[-1]
    if not isinstance(question, str):
        return
    tokenizer = settings.model.text_tokenizer()
    given = (doc.text if isinstance(doc, Passage) else doc for doc in documents or ())
    texts = (block for block in (*settings.ask.blocks, *given) if isinstance(block, str))
    asked = tokenizer.unknown_words(question)
    words_of = map(tokenizer.unknown_words, settings.one_by_one(texts))
    lacking = dict.fromkeys(word for words in words_of for word in words)
    for what, words in (("question", asked), ("documents", list(lacking))):
        if words:
            yield f"the model's vocabulary lacks words of the {what}: {some_of(words)}"
    around = np.concatenate((prompt.prefix, prompt.final))
    lost = 0 if tokenizer.unk_id is None else int((around == tokenizer.unk_id).sum())
    if lost and not asked:
        yield (
            f"the model's vocabulary lacks {lost} tokens of the template "
            f"{settings.template.name!r}; use the one that it was trained with"
        )


def _behind_others(
    settings: Settings, members: list[FoundChunk], prompt: Prompt
) -> tuple[Prompt, list[FoundChunk]]:
    """With what each chunk was, or is to be, encoded behind, if the method's encoder sees any.

    Neighbours in the knowledge base of chunks that were retrieved; of chunks that were given as
    ``Settings.neighbours`` says. Turns have none.
    """
    seeing = seeing_encoders(settings.method)
    if not seeing:
        return prompt, members
    stored = [chunk.chunk_id for chunk in members if chunk.chunk_id is not None]
    chunks = [prompt.chunks[index] for index in prompt.places]
    pairs = zip(members, chunks, strict=True)
    given = [(_found_by(settings, member), ids) for member, ids in pairs if member.chunk_id is None]
    room = settings.model.config.max_positions - len(prompt.prefix)
    kb, template, groups = settings.kb, settings.template, settings.ask.groups
    others = iter(
        behind_given(settings.neighbours, kb, settings.method, template, given, room, groups)
    )
    placed: Iterator[Placed] = iter(())
    if settings.kb is not None and stored:
        placed = iter(settings.kb.placed(stored, seeing[0], settings.template))
    placings = [next(others if member.chunk_id is None else placed) for member in members]
    of_members = iter(placings)
    turns = prompt.turns
    every = tuple(
        None if at in turns else next(of_members).neighbours for at in range(len(prompt.chunks))
    )
    return dataclasses.replace(prompt, neighbours=every), [
        dataclasses.replace(member, behind=placing.content_ids)
        for member, placing in zip(members, placings, strict=True)
    ]


def _found_by(settings: Settings, chunk: FoundChunk) -> str:
    """What neighbours of a given chunk are found by; "" where none are searched for."""
    if settings.neighbours == "prompt" or (settings.neighbours == "corpus" and settings.kb is None):
        return ""
    text = chunk.source.text or settings.model.text_tokenizer().decode(chunk.ids)
    return searched_text(chunk.title, text)


def _primer_tokens(settings: Settings, prompt: Prompt, bare: bool) -> HostArray | None:
    """What chunks are encoded behind, as ``Primer.tokens``; None where they see nothing.

    ``bare``: nothing stands around the prompt's chunks, as they were pasted or are token ids.
    Raises RequestError where the model's context does not hold it with a chunk, and ConfigError
    for vectors of another model.
    """
    if settings.primer is None:
        return None
    settings.primer.check_model(settings.model.digest, settings.model.config)
    template = template_named(BARE) if bare else settings.template
    ids = settings.primer.tokens(template, settings.model.text_tokenizer())
    longest = len(prompt.prefix) + max(prompt.lengths, default=0)
    if longest + len(ids) > settings.model.config.max_positions:
        raise RequestError(
            f"primer {settings.primer.name!r} has {len(ids)} tokens, prefix and longest chunk have "
            f"{longest}, and the model has {settings.model.config.max_positions} positions; use "
            "smaller chunks or a shorter primer"
        )
    return ids
