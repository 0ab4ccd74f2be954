"""What is asked: the settings of a run, and one question with its chunks as token ids."""

import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from jaxrag.base.errors import RequestError
from jaxrag.base.types import HostArray
from jaxrag.engine.engine import engine_of
from jaxrag.engine.request import Prompt, Request, check_length
from jaxrag.engine.sampling import SamplingParams
from jaxrag.kv.store import KVStore
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.library.knowledge_base.neighbours import each_other
from jaxrag.library.knowledge_base.search import SearchMode
from jaxrag.library.retrieve.filters import Filter
from jaxrag.models.model import Model, as_token_ids
from jaxrag.models.text.prompts import PromptTemplate, QuestionIds, template_named
from jaxrag.models.text.tokenizer import Tokenizer
from jaxrag.reuse.attention_index.document import Indexing
from jaxrag.reuse.decode import DecodeRule, rule_from
from jaxrag.reuse.encode import encoder_named
from jaxrag.reuse.methods import Method, Misses, method_named
from jaxrag.serve.conversation import FoundChunk, Source, laid_out
from jaxrag.serve.door import Conversation, Passage, Text, check_counts, check_kinds
from jaxrag.serve.suits import gated, renamed, stored_otherwise, unplaced, untuned

Unanswerable = Literal["abstain", "ask"]  # what to do where a filter or least score leaves nothing

_SHOWN_WORDS = 5  # of those that a tokenizer lacks
_SHOWN_CHARACTERS = 40  # of each


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all questions of a run have in common. Make one with ``resolve``."""

    model: Model
    kb: KnowledgeBase | None
    store: KVStore
    method: Method
    template: PromptTemplate
    k: int
    max_new_tokens: int
    stop: tuple[str, ...]
    where: Mapping[str, Any] | None = None  # which documents may be retrieved
    search_mode: SearchMode | None = None
    min_score: float | None = None  # of what is retrieved
    unanswerable: Unanswerable = "abstain"
    notes: tuple[str, ...] = ()  # of every request

    @property
    def indexing(self) -> Indexing | None:
        """What indexes long chunks are stored with, by the knowledge base."""
        return None if self.kb is None else self.kb.indexing


@dataclasses.dataclass(frozen=True)
class ReadyQuestion:
    """One question, ready to be served. Make one with ``prepare``.

    Attributes:
      request: what the engine is asked.
      sources: the chunks of its prompt, in prompt order.
      retrieve_seconds: what finding them took.
      notes: what a result says about all that happened so far.
      retrieved: whether the chunks are those of the knowledge base.
      abstains: whether the model is not asked, as the filter or the least score left no chunk.
    """

    request: Request
    sources: list[Source]
    retrieve_seconds: float
    notes: list[str]
    retrieved: bool = True
    abstains: bool = False


def resolve(
    *,
    kb: KnowledgeBase | None,
    model: Model | None,
    method: str | Method,
    recompute_ratio: float | None = None,
    misses: Misses | None = None,
    prefix_cache: bool | None = None,
    decode: str | DecodeRule | None = None,
    template: str | PromptTemplate | None,
    k: int,
    max_new_tokens: int,
    stop: Sequence[str],
    where: Mapping[str, Any] | None = None,
    search_mode: SearchMode | None = None,
    min_score: float | None = None,
    unanswerable: Unanswerable = "abstain",
    store: KVStore | None = None,
) -> Settings:
    """Check the arguments that all questions share; they are those of ``generate``.

    Without a knowledge base, KV of documents is kept in ``store``; None: the engine's memory.

    A method that is named, with no ratio, runs at the ratio that the gate of the knowledge base
    found; a Method says its ratio itself.

    Raises RequestError, and TokenizerError when stop strings are given to a model without text.
    """
    check_kinds(
        kb=kb,
        model=model,
        method=method,
        template=template,
        recompute_ratio=recompute_ratio,
        prefix_cache=prefix_cache,
    )
    check_counts(k=k, max_new_tokens=max_new_tokens)
    named = isinstance(method, str)
    method = method_named(method)
    if recompute_ratio is not None:
        method = method.with_ratio(recompute_ratio)
    if misses is not None:
        method = dataclasses.replace(method, misses=misses)
    if prefix_cache is not None:
        method = dataclasses.replace(method, prefix_cache=prefix_cache)
    if decode is not None:
        method = dataclasses.replace(method, decode=rule_from(decode))
    if kb is not None and model is not None and kb.model is not model:
        raise RequestError("model= differs from the knowledge base's model; pass only kb=")
    model = model if kb is None else kb.model
    if model is None:
        raise RequestError("no model: pass model=, or open the knowledge base with one")
    texts = isinstance(stop, Sequence) and not isinstance(stop, str)
    if not texts or not all(isinstance(s, str) and s for s in stop):
        raise RequestError(f"stop={stop!r}: expected a list of non-empty strings")
    if stop:
        model.text_tokenizer()
    if where is not None:
        Filter.parse(where)
        if kb is None:
            raise RequestError("where= chooses documents of a knowledge base; pass kb= with it")
    for name, value in (("search_mode", search_mode), ("min_score", min_score)):
        if value is not None and kb is None:
            raise RequestError(f"{name}= is about a knowledge base; pass kb= with it")
    if unanswerable not in get_args(Unanswerable):
        raise RequestError(
            f"unanswerable={unanswerable!r}: expected one of {', '.join(get_args(Unanswerable))}"
        )
    chosen, notes = _template(template, kb, model, method)
    if kb is not None and named and recompute_ratio is None:
        method, told = gated(kb, method, chosen)
        notes += told
    notes += (*renamed(method, chosen), *untuned(model, kb, method, chosen))
    notes += unplaced(model, method)
    method.check(model.config)
    method.check_values(model.value_layers)
    if model.kv == "host":
        method.check_host(model.config, generates=max_new_tokens > 1)
    method.decode.check_mesh(model.mesh)
    return Settings(
        model=model,
        kb=kb,
        store=kb.store if kb is not None else store or engine_of(model).memory,
        method=method,
        template=chosen,
        k=k,
        max_new_tokens=max_new_tokens,
        stop=tuple(stop),
        where=where,
        search_mode=search_mode,
        min_score=min_score,
        unanswerable=unanswerable,
        notes=notes,
    )


def _template(
    given: str | PromptTemplate | None, kb: KnowledgeBase | None, model: Model, method: Method
) -> tuple[PromptTemplate, tuple[str, ...]]:
    """The caller's prompt format, else the knowledge base's, else the model's; and notes on it.

    Raises TokenizerError where the caller names one with markers that the model's tokenizer cuts
    into pieces. A recorded one is used all the same, as its chunks are stored in it.
    """
    if given is not None:
        chosen = template_named(given) if isinstance(given, str) else given
        if model.tokenizer is not None:
            chosen.check_markers(model.tokenizer)
        return chosen, ()
    chosen = kb.template if kb else model.prompt_format(method.template)
    wrong = None if model.tokenizer is None else chosen.split_marker(model.tokenizer)
    if wrong is None:
        return chosen, ()
    of = "knowledge base" if kb else "model"
    return chosen, (
        f"{wrong}; the {of} was made with it, so it is used all the same: a new knowledge base "
        "with another --template spares these tokens",
    )


def prepare(
    settings: Settings,
    question: Text | Conversation,
    documents: Sequence[Text | Passage] | None,
    sampling: SamplingParams,
    blocks: Sequence[Text] = (),
) -> ReadyQuestion:
    """Retrieve the chunks, or take the documents, and turn every part into token ids.

    Runs nothing on the device; an engine that serves already begins to read the chunks into host
    memory. Documents stand before the first question of a conversation; what
    is retrieved, before the question that it was found for, and once. Words that the tokenizer
    lacks are named in the notes. Raises RequestError for a question that cannot be served: empty,
    of words that the model cannot read (one of them, if its vocabulary is a list of words; all of
    them, if it is one of sub-words), longer than the model's context, larger than the cache, or
    with neither documents nor a knowledge base; TokenizerError for text that meets a model without
    a tokenizer.
    """
    model = settings.model
    talk = question if isinstance(question, Conversation) else Conversation((question,))
    if talk.earlier == "blocks" and settings.method.encoder is None:
        raise RequestError(
            f"earlier_turns='blocks': method {settings.method.name!r} computes the whole prompt "
            "and reads no blocks; leave it out, or choose a method that reuses chunks"
        )
    start = time.perf_counter()
    _check_said(talk, model)
    notes = list(settings.notes)
    found: list[list[FoundChunk]] = [[] for _ in talk.questions]
    if documents is not None:
        found[0] = [_given(f"documents[{i}]", it, model) for i, it in enumerate(documents)]
    elif settings.kb is not None:
        found = _retrieve_all(settings, talk, notes)
    elif not (len(blocks) or talk is question):
        raise RequestError("no knowledge base and no documents to answer from; give one of them")
    retrieve_seconds = time.perf_counter() - start
    chosen = settings.where is not None or settings.min_score is not None
    nothing = not any(found) and (settings.kb is not None or documents is not None)
    abstains = nothing and chosen and documents is None and settings.unanswerable == "abstain"
    if nothing:
        what = "was asked without any"
        if abstains:
            what = "was not asked; unanswerable='ask' (--unanswerable ask) asks it without any"
        notes.append(f"no chunk was found for the question; it {what}")
        if settings.min_score is not None:
            notes.append(f"only chunks with a score of {settings.min_score:g} or more count")
        if settings.where is not None and settings.kb is not None:
            notes += (f"where: {why}" for why in settings.kb.why_nothing(settings.where))
    bare = [_given(f"blocks[{i}]", it, model) for i, it in enumerate(blocks)]
    found[0] = [*(dataclasses.replace(it, bare=True) for it in bare), *found[0]]
    prompt, members = _laid_out(settings, talk, found)
    if isinstance(talk.questions[-1], str):
        given = (it.text if isinstance(it, Passage) else it for it in documents or ())
        texts = [it for it in (*blocks, *given) if isinstance(it, str)]
        around = np.concatenate((prompt.prefix, prompt.final))
        tokenizer = model.text_tokenizer()
        notes += _unknown(tokenizer, settings.template, talk.questions[-1], texts, around)
    notes += _on_turns(settings.method, talk)
    check_length(model, prompt, settings.max_new_tokens)
    prompt = dataclasses.replace(prompt, neighbours=_neighbours(settings, members, prompt))
    retrieved = documents is None and len(members) == sum(it.chunk_id is not None for it in members)
    request = Request(
        prompt,
        settings.store,
        _keeping(settings.method) if talk.keeps else settings.method,
        settings.max_new_tokens,
        sampling=sampling,
        eos_ids=_eos_ids(model),
        indexing=settings.indexing,
        encoders=_kept(settings) if retrieved else None,
        keeps=talk.keeps,
    )
    engine_of(model).check_fits(request)
    if not abstains:
        engine_of(model).prefetch([request])
    sources = [chunk.source for chunk in members]
    return ReadyQuestion(request, sources, retrieve_seconds, notes, retrieved, abstains)


def _keeping(method: Method) -> Method:
    """The method, with leading parts kept where that is exact whatever the pool holds."""
    return dataclasses.replace(method, prefix_cache=True) if method.encoder is None else method


def _check_said(talk: Conversation, model: Model) -> None:
    """Refuse texts that cannot be read, and a question whose sense the tokenizer would lose."""
    *earlier, question = talk.questions
    for what, text in (
        ("the system message", talk.system or "none"),
        *(("an earlier question", it) for it in earlier),
        *(("an earlier answer", it) for it in talk.answers),
        ("the question", question),
    ):
        if isinstance(text, str):
            _check_text(what, text)
    if isinstance(question, str):
        _check_words(model.text_tokenizer(), question)


def _laid_out(
    settings: Settings, talk: Conversation, found: Sequence[Sequence[FoundChunk]]
) -> tuple[Prompt, list[FoundChunk]]:
    """The prompt as token ids, and its chunks but for turns."""
    model, template = settings.model, settings.template
    texts = [text for text in talk.questions if isinstance(text, str)]
    if texts:
        tokenizer = model.text_tokenizer()
        asked = template.conversation(tokenizer, texts, talk.system)
    else:  # token ids stand for themselves: no template, as there may be no tokenizer
        none = np.zeros(0, np.int32)
        ids = [_given("question", one, model).ids for one in talk.questions]
        asked = [QuestionIds(none, one, (0, len(one))) for one in ids]
    answers = [_given("an answer", one, model).ids for one in talk.answers]

    def wrap(chunk: FoundChunk) -> HostArray:
        if chunk.bare or not texts:
            return chunk.ids
        return template.chunk_ids(tokenizer, chunk.ids, chunk.title)

    def shown(ids: HostArray) -> str:
        return tokenizer.decode(ids) if texts else ""

    return laid_out(asked, answers, found, wrap, talk.earlier, shown)


def _on_turns(method: Method, talk: Conversation) -> Iterator[str]:
    """Notes on what a method makes of a conversation."""
    if talk.system:
        yield (
            "the system message stands behind the chunks of the first question: before them it "
            "would be part of what they are stored under"
        )
    if not talk.answers:
        return
    if talk.earlier == "blocks":
        yield (
            "earlier turns are read as blocks, each for itself: an approximation, which the model "
            "has to be trained for"
        )
    elif talk.keeps and (method.recomputes or method.misses == "in_place"):
        what = "chooses tokens by the question" if method.recomputes else "computes gaps in place"
        yield f"earlier turns were computed again with this question: {method.name} {what}"


def _kept(settings: Settings) -> tuple[str, ...] | None:
    """The encoders under which the knowledge base keeps what is retrieved, as the prompt has it."""
    kb = settings.kb
    if kb is None or stored_otherwise(kb, settings.method, settings.template):
        return None
    return tuple(kb.encoders)


def _eos_ids(model: Model) -> frozenset[int]:
    tokenizer = model.tokenizer
    return frozenset((*model.config.eos_ids, *(tokenizer.eos_ids if tokenizer else ())))


def _check_text(what: str, text: str) -> None:
    if not text.strip():
        raise RequestError(f"{what} is empty; expected a text with words in it")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{what} holds half of a surrogate pair at character {error.start}; repair the text"
        ) from None


def _check_words(tokenizer: Tokenizer, question: str) -> None:
    """Refuse a question whose sense the tokenizer would lose."""
    unknown = tokenizer.unknown_words(question)
    if unknown and (tokenizer.is_word_level or not tokenizer.knows_a_word(question)):
        raise RequestError(
            f"the question holds {_some(unknown)}: not in this model's vocabulary of "
            f"{tokenizer.vocab_size} entries; ask in words that it knows, or use another model"
        )


def _unknown(
    tokenizer: Tokenizer,
    template: PromptTemplate,
    question: str,
    documents: Sequence[str],
    around: HostArray,
) -> Iterator[str]:
    """Notes on what becomes the unknown token; ``around`` are the ids around the chunks."""
    asked = tokenizer.unknown_words(question)
    given = dict.fromkeys(word for text in documents for word in tokenizer.unknown_words(text))
    for what, words in (("question", asked), ("documents", list(given))):
        if words:
            yield f"the model's vocabulary lacks words of the {what}: {_some(words)}"
    lost = 0 if tokenizer.unk_id is None else int((around == tokenizer.unk_id).sum())
    if lost and not asked:
        yield (
            f"the model's vocabulary lacks {lost} tokens of the template {template.name!r}; "
            "use the one that it was trained with"
        )


def _some(words: Sequence[str]) -> str:
    """Up to five of them, quoted, and how many more there are."""
    shown = ", ".join(repr(word[:_SHOWN_CHARACTERS]) for word in words[:_SHOWN_WORDS])
    more = len(words) - _SHOWN_WORDS
    return shown + (f" and {more} more" if more > 0 else "")


def _retrieve_all(
    settings: Settings, talk: Conversation, notes: list[str]
) -> list[list[FoundChunk]]:
    """Of every question the chunks that none before it has found; ``notes`` gets the search's."""
    seen: set[int | None] = set()
    found = []
    for question in (*talk.questions[:-1], talk.query or talk.questions[-1]):
        retrieved, told = _retrieve(settings, question)
        notes += (note for note in told if note not in notes)
        found.append([it for it in retrieved if it.chunk_id not in seen])
        seen.update(it.chunk_id for it in found[-1])
    return found


def _retrieve(settings: Settings, question: Text) -> tuple[list[FoundChunk], tuple[str, ...]]:
    assert settings.kb is not None
    if not isinstance(question, str):
        raise RequestError("retrieval needs the question as text; pass documents= with token ids")
    hits = settings.kb.search(
        question,
        settings.k,
        where=settings.where,
        mode=settings.search_mode,
        min_score=settings.min_score,
    )
    return [
        FoundChunk(
            Source(h.document_id, h.chunk_index, h.file, h.score, h.text, h.page, h.start, h.end),
            h.title,
            h.ids,
            h.chunk_id,
        )
        for h in settings.template.arrange(hits)
    ], hits.notes


def _neighbours(
    settings: Settings, members: Sequence[FoundChunk], prompt: Prompt
) -> tuple[tuple[HostArray, ...], ...] | None:
    """What each chunk was, or is to be, encoded behind; None where the method's encoder sees none.

    Neighbours in the knowledge base of chunks that were retrieved. Chunks that were given are each
    other's, in their order, as many as there may be. Turns have none.
    """
    names = (settings.method.encoder, settings.method.first_encoder)
    seeing = [name for name in names if name is not None and encoder_named(name).sees_neighbours]
    if not seeing:
        return None
    stored = [chunk.chunk_id for chunk in members if chunk.chunk_id is not None]
    chunks = [ids for index, ids in enumerate(prompt.chunks) if index not in prompt.turns]
    of_given = [ids for it, ids in zip(members, chunks, strict=True) if it.chunk_id is None]
    room = settings.model.config.max_positions - len(prompt.prefix)
    others = iter(list(each_other(of_given, room)))
    in_kb: Iterator[tuple[HostArray, ...]] = iter(())
    if settings.kb is not None and stored:
        in_kb = iter(settings.kb.neighbours_of(stored, seeing[0], settings.template))
    of_members = iter([next(others if it.chunk_id is None else in_kb) for it in members])
    return tuple(
        () if index in prompt.turns else next(of_members) for index in range(len(prompt.chunks))
    )


def _given(what: str, document: Text | Passage, model: Model) -> FoundChunk:
    """A text or token ids passed by the caller, as one chunk."""
    if isinstance(document, Passage):
        found = _given(what, document.text, model)
        source = dataclasses.replace(found.source, document_id=document.document_id or what)
        return dataclasses.replace(found, source=source, title=document.title)
    if isinstance(document, str):
        _check_text(what, document)
        ids, text = model.text_tokenizer().encode(document), document
    else:
        ids, text = as_token_ids(document, model.config, what), ""
    return FoundChunk(Source(what, 0, None, None, text, end=len(text)), "", ids)


def shown_prompt(model: Model, prompt: Prompt) -> list[dict[str, Any]]:
    """The parts of a prompt as the model reads them: name, tokens, and text with special tokens.

    Named as in ``Result.reuse``, and "final block" at last; text is "" without a tokenizer. Parts
    without a token are left out.
    """
    counts = {"chunk": itertools.count(), "turn": itertools.count()}
    kinds = ["turn" if i in prompt.turns else "chunk" for i in range(len(prompt.chunks))]
    names = ["prefix", *(f"{kind} {next(counts[kind])}" for kind in kinds), "final block"]
    parts = zip(names, (prompt.prefix, *prompt.chunks, prompt.final), strict=True)
    tokenizer = model.tokenizer
    return [
        {
            "part": name,
            "tokens": len(ids),
            "text": "" if tokenizer is None else tokenizer.decode(ids, skip_special=False),
        }
        for name, ids in parts
        if len(ids)
    ]
