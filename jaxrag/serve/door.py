"""What callers of ``generate`` hand over, checked before anything is done with it."""

import itertools
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrag.engine.sampling import SamplingParams
from jaxrag.errors import RequestError
from jaxrag.knowledge_base import KnowledgeBase
from jaxrag.methods import Method
from jaxrag.models.model import Model
from jaxrag.text.prompts import PromptTemplate
from jaxrag.types import HostArray

Text = str | Sequence[int] | HostArray  # text, or token ids where a model has no tokenizer

_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "kb": ((KnowledgeBase,), "a KnowledgeBase, as KnowledgeBase.open(DIR, model=...) gives it"),
    "model": ((Model,), "a Model, as load_model(DIR) gives it"),
    "method": ((str, Method), "a preset's name, a .toml file or a Method"),
    "template": ((str, PromptTemplate), "a template's name, a .toml file or a PromptTemplate"),
    "recompute_ratio": ((int, float, np.number), "a number from 0 to 1"),
}


def check_kinds(**given: Any) -> None:
    """Refuse arguments of another kind than they must be; None passes. Raises RequestError."""
    for name, value in given.items():
        kinds, expected = _KINDS[name]
        if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
            raise RequestError(f"{name}={reprlib.repr(value)}: expected {expected}")


def check_counts(**given: Any) -> None:
    """Refuse what is no positive integer: RequestError."""
    for name, value in given.items():
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if not whole or value < 1:
            raise RequestError(f"{name}={reprlib.repr(value)}: expected a positive integer")


def is_ids(x: Any) -> bool:
    """Is this one sequence of token ids, rather than several questions?"""
    if isinstance(x, np.ndarray):
        return x.ndim == 1
    return bool(_is_list(x)) and bool(x) and all(isinstance(i, int | np.integer) for i in x)


def questions_of(question: Any) -> tuple[list[Text], bool]:
    """The questions, and whether it was a single one. Raises RequestError for what is none."""
    if isinstance(question, str) or is_ids(question):
        return [question], True
    if not _is_list(question) or not all(isinstance(one, str) or is_ids(one) for one in question):
        raise RequestError(
            f"question={reprlib.repr(question)}: expected a text, token ids, or a list of these"
        )
    return list(question), False


def check_documents(documents: Any) -> None:
    """Refuse what is no list of texts or of token ids: RequestError. None passes."""
    if documents is None:
        return
    if isinstance(documents, str):
        raise RequestError(
            f"documents={reprlib.repr(documents)} is one text: expected a list; write "
            "documents=[...], each entry is one chunk"
        )
    if not _is_list(documents):
        raise RequestError(f"documents={reprlib.repr(documents)}: expected a list of texts")
    for i, document in enumerate(documents):
        if not isinstance(document, str) and not _is_list(document):
            raise RequestError(
                f"documents[{i}]={reprlib.repr(document)}: expected a text or token ids"
            )


def samplings_of(sampling: Any, count: int) -> list[SamplingParams]:
    """One for each of so many questions, greedy for None. Raises RequestError."""
    if sampling is None or isinstance(sampling, SamplingParams):
        return list(itertools.repeat(sampling or SamplingParams(), count))
    if not _is_list(sampling) or not all(isinstance(one, SamplingParams) for one in sampling):
        raise RequestError(
            f"sampling={reprlib.repr(sampling)}: expected jaxrag.Sampling, such as "
            "jaxrag.Sampling(temperature=0.7), or a list with one for each question"
        )
    if len(sampling) != count:
        raise RequestError(
            f"sampling has {len(sampling)} entries for {count} question(s); give one for each, or "
            "a single SamplingParams for all"
        )
    return list(sampling)


def _is_list(x: Any) -> bool:
    array = isinstance(x, np.ndarray) and x.ndim > 0
    return array or (isinstance(x, Sequence) and not isinstance(x, str | bytes | Mapping))
