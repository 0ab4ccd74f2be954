"""Chunks that are given with a question, and the neighbours that they are encoded behind."""

import dataclasses
import reprlib
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from jaxrag.base.errors import RequestError
from jaxrag.base.types import HostArray
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.library.knowledge_base.neighbours import GivenChunk, Placed, each_other
from jaxrag.library.knowledge_base.passages import PassageCorpus
from jaxrag.library.options import NeighboursFrom
from jaxrag.models.model import Model, as_token_ids
from jaxrag.models.text.prompts import PromptTemplate
from jaxrag.reuse.encode import encoder_named
from jaxrag.reuse.methods import Method
from jaxrag.serve.conversation import FoundChunk, Passage, Source, Text
from jaxrag.serve.words import check_text


def check_neighbours(value: Any) -> None:
    """Refuse what is no place to find neighbours in: RequestError."""
    choices = get_args(NeighboursFrom)
    if not isinstance(value, PassageCorpus) and value not in choices:
        shown = reprlib.repr(value)
        raise RequestError(f"neighbours={shown}: expected one of {', '.join(choices)}")


def behind_given(
    source: NeighboursFrom | PassageCorpus,
    kb: KnowledgeBase | None,
    method: Method,
    template: PromptTemplate,
    given: Sequence[tuple[str, HostArray]],
    room: int,
    groups: Sequence[str] | None,
) -> Sequence[Placed]:
    """Given chunks, the text that is searched for and token ids [T] int32 of each, behind others.

    ``room``: positions of the context for a chunk and what is in front of it, and of a knowledge
    base the ``groups`` whose chunks may be. Raises RequestError where nothing says where the others
    come from.
    """
    if not given:
        return ()
    if source == "prompt":
        own = [ids for _, ids in given]
        return [Placed(ids, others) for ids, others in zip(own, each_other(own, room), strict=True)]
    if source == "corpus" and kb is None:
        if method.misses == "in_place":  # nothing is encoded, and what is found had none either
            return [Placed(ids, ()) for _, ids in given]
        raise RequestError(
            f"method {method.name!r} reads chunks behind their neighbours, and given ones "
            "(documents=, blocks=) have none: pass kb= to find some in, or neighbours='prompt', an "
            "oracle: the prompt's own others"
        )
    searched = [GivenChunk(text, ids) for text, ids in given]
    if isinstance(source, PassageCorpus):
        return source.behind(searched, room)
    assert kb is not None
    return kb.placed_given(searched, template, room, groups)


def seeing_encoders(method: Method) -> list[str]:
    """Its encoders that see neighbours."""
    return [name for name in method.encoders if encoder_named(name).sees_neighbours]


def neighbours_account(
    method: Method, source: NeighboursFrom | PassageCorpus
) -> dict[str, Any] | None:
    """What a result says of the neighbours of given chunks; None where a method sees none.

    {"from": "corpus", "name": ..., ...} or {"from": "prompt", "oracle": True}, JSON-able.
    """
    if not seeing_encoders(method):
        return None
    if isinstance(source, PassageCorpus):
        return source.about
    return {"from": "prompt", "oracle": True} if source == "prompt" else {"from": "corpus"}


def on_neighbours(
    source: NeighboursFrom | PassageCorpus, kb: KnowledgeBase | None
) -> Iterator[str]:
    """Notes on where the neighbours of given chunks come from."""
    if source == "prompt":
        yield (
            "given chunks are encoded behind the prompt's own others (neighbours='prompt'): an "
            "oracle, as nobody who stored them before the question could have known these"
        )
    elif isinstance(source, PassageCorpus):
        yield f"neighbours of given chunks are the most similar among {source.name}"
    elif kb is not None:
        yield f"neighbours of given chunks are the most similar in knowledge base {kb.path.name}"


def given_chunk(what: str, document: Text | Passage, model: Model) -> FoundChunk:
    """A text or token ids passed by the caller, as one chunk."""
    if isinstance(document, Passage):
        chunk = given_chunk(what, document.text, model)
        source = dataclasses.replace(chunk.source, document_id=document.document_id or what)
        return dataclasses.replace(chunk, source=source, title=document.title)
    if isinstance(document, str):
        check_text(what, document)
        ids, text = model.text_tokenizer().encode(document), document
    else:
        ids, text = as_token_ids(document, model.config, what), ""
    return FoundChunk(Source(what, 0, None, None, text, end=len(text)), "", ids)
