"""Passages that stand in for a knowledge base where neighbours are looked for.

They are in memory and have no KV of their own: what is evaluated on a data set's passages has
neighbours as a knowledge base of these passages would find them by words.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrag.base.types import HostArray
from jaxrag.library.knowledge_base.neighbours import GivenChunk, Placed, that_fit
from jaxrag.library.options import DEFAULT_TOP_N
from jaxrag.library.retrieve.base import Found, searched_text
from jaxrag.library.retrieve.bm25 import in_memory
from jaxrag.library.retrieve.terms import terms
from jaxrag.models.model import Model
from jaxrag.models.text.prompts import PromptTemplate

_CUT = 3  # words at the end of a passage that another number in front may push out of it


@dataclasses.dataclass(frozen=True, eq=False)
class PassageCorpus:
    """Passages among which the neighbours of chunks are found, by BM25.

    Attributes:
      name: what a result calls it.
      passages: title of each, and its text or token ids int32 [T].
      model: whose tokens count.
      template: what wraps them.
      chunk_tokens: of a passage the first so many are taken; None: all.
      numbering: a regular expression of what a text begins with that tells its place in a prompt,
        such as "Passage 3:"; passages that differ in nothing else are one.
    """

    name: str
    passages: tuple[tuple[str, str | HostArray], ...]
    model: Model
    template: PromptTemplate
    chunk_tokens: int | None = None
    numbering: str = ""
    top_n: int = DEFAULT_TOP_N

    @property
    def about(self) -> dict[str, Any]:
        """What a result says of it, JSON-able."""
        return {
            "from": "corpus",
            "name": self.name,
            "passages": len(self.passages),
            "by": "bm25",
            "top_n": self.top_n,
        }

    def behind(self, chunks: Sequence[GivenChunk], room: int) -> list[Placed]:
        """Chunks with the ``top_n`` passages most similar to each, the most similar first.

        A passage with the chunk's own tokens or words is none of them, nor a second one with equal
        tokens.
        The list ends before the first that does not fit ``room`` tokens with the chunk.
        """
        return [self._placed(chunk, room) for chunk in chunks]

    def _placed(self, chunk: GivenChunk, room: int) -> Placed:
        asked = self.without_number(chunk.text)
        own = terms(asked)
        # Where its end is cut off behind another number, a word may be in one and not the other.
        is_cut = self.chunk_tokens is not None and len(chunk.ids) >= self.chunk_tokens
        others: dict[bytes, HostArray] = {}
        ranking: list[int] = []
        depth = self.top_n + 1
        while len(others) < self.top_n:
            before = len(ranking)
            ranking = [hit.chunk_id for hit in self._words(asked, depth)]
            for number in ranking[before:]:
                ids, words = self._prompt_ids(number), terms(self._searched(number))
                same = np.array_equal(ids, chunk.ids) or _equal(own, words, _CUT * is_cut)
                if not same:
                    others.setdefault(ids.tobytes(), ids)
            if len(ranking) < depth:
                break  # there are no more
            depth *= 2
        nearest = list(others.values())[: self.top_n]
        return Placed(chunk.ids, that_fit(nearest, room - len(chunk.ids)))

    def without_number(self, text: str) -> str:
        """A text without what tells its place in a prompt."""
        return re.sub(rf"\A\s*(?:{self.numbering})", "", text) if self.numbering else text

    def _searched(self, number: int) -> str:
        """What is searched of a passage."""
        title, body = self.passages[number]
        return searched_text(title, self.without_number(self._text(body)))

    @functools.cached_property
    def _words(self) -> Callable[[str, int], list[Found]]:
        return in_memory((number, self._searched(number)) for number in range(len(self.passages)))

    def _text(self, body: str | HostArray) -> str:
        """As much of a passage as is taken."""
        if isinstance(body, str) and self.chunk_tokens is None:
            return body
        ids = self._ids(body)
        tokenizer = self.model.text_tokenizer()
        whole = isinstance(body, str) and len(ids) == len(tokenizer.encode(body))
        return str(body) if whole else tokenizer.decode(ids)

    def _ids(self, body: str | HostArray) -> HostArray:
        """The token ids that are taken of a passage, int32 [T]."""
        ids = self.model.text_tokenizer().encode(body) if isinstance(body, str) else body
        return ids[: self.chunk_tokens]

    def _prompt_ids(self, number: int) -> HostArray:
        """Token ids of a passage as it stands in a prompt, int32 [T]."""
        title, body = self.passages[number]
        return self.template.chunk_ids(self.model.text_tokenizer(), self._ids(body), title)


def _equal(one: Sequence[str], other: Sequence[str], slack: int) -> bool:
    """Are these the same words, but for up to ``slack`` at the ends?"""
    if abs(len(one) - len(other)) > slack:
        return False
    least = max(1, min(len(one), len(other)) - slack) if slack else len(one)
    return list(one[:least]) == list(other[:least])
