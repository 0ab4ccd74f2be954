"""A question on a haystack, and the same cut to an exact number of tokens for one model.

Sentences are tokenised in the company of others, once, and put together as ids, so a needle has the
same ids wherever it is hidden, and the length of a prompt is exact to the token.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxrag.base.errors import RequestError
from jaxrag.base.types import HostArray
from jaxrag.models.text.prompts import PromptTemplate
from jaxrag.models.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Case:
    """One question, as text; the haystack is as long as it is asked to be.

    Attributes:
      needles: the sentences that are hidden.
      depths: where, each a share of the filler that precedes it; 0 is the start of the
        haystack, 1 its end.
      filler: makes the sentences around them, the same ones at every call; many more than needed.
      expected: the answers that scoring looks for.
      lead: the words an answer begins with, for models that complete text; may be empty.
      between: what is put between the answers where a model is trained to give them.
      least: sentences of filler without which the question means nothing.
    """

    needles: tuple[str, ...]
    depths: tuple[float, ...]
    filler: Callable[[], Iterator[str]]
    question: str
    expected: tuple[str, ...]
    lead: str = ""
    glue: str = " "
    between: str = ", "
    least: int = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Fitted:
    """A case as token ids of one model and template.

    Attributes:
      chunks: the haystack, int32 [T] each, without what the template puts around a chunk.
      lead: int32 [T], the beginning of the answer, behind the final block.
      at: order in the prompt of each needle's first token.
      num_tokens: of the whole prompt, template and lead included.
    """

    case: Case
    chunks: tuple[HostArray, ...]
    lead: HostArray
    at: tuple[int, ...]
    num_tokens: int


@dataclasses.dataclass(frozen=True)
class _Unit:
    """A sentence of the haystack; ``needle`` is its number, or -1 for filler."""

    ids: HostArray
    needle: int


@dataclasses.dataclass(frozen=True)
class Frame:
    """What is around the haystack of one model.

    Attributes:
      chunk_tokens: most tokens of a chunk; None = one chunk.
      with_lead: whether prompts end with the beginning of the answer.
    """

    tokenizer: Tokenizer
    template: PromptTemplate
    chunk_tokens: int | None = None
    with_lead: bool = True

    def fit(self, case: Case, length: int) -> Fitted:
        """The case with a prompt of exactly ``length`` tokens.

        Sentences are whole but for the last of the filler, which is cut; a sentence of filler that
        is longer than a chunk is cut into chunks.

        Raises RequestError for a length that the needles do not fit into, a chunk that a needle
        does not fit into, filler that ends before the length is reached, or words that the model's
        vocabulary lacks.
        """
        self._refuse_unknown((*case.needles, case.question, case.lead, *case.expected))
        tokenizer = self.tokenizer
        lead = self._lead(case)
        prefix = len(self.template.prefix_ids(tokenizer))
        final = len(self.template.final_ids(tokenizer, case.question)) + len(lead)
        before, around = self.markers()
        needles = in_text(tokenizer, case.needles, case.glue) if case.needles else []
        room = length - prefix - final
        filler = self._filler(case, max(room - sum(map(len, needles)), 1))
        count = 1
        least = sum(map(len, (*needles, *filler[: case.least])))
        if self.chunk_tokens is not None:
            self._refuse_long(case, needles)
            filler = [
                piece
                for ids in filler
                for piece in np.split(ids, range(self.chunk_tokens, len(ids), self.chunk_tokens))
            ]
            count = max(-(-room // (self.chunk_tokens + around)), 1)
        while True:
            tokens = room - count * around - sum(map(len, needles))
            if tokens < least - sum(map(len, needles)):
                raise RequestError(
                    f"length {length}: template, question and what is hidden take "
                    f"{prefix + final + count * around + least} tokens with the least filler; ask "
                    "for a longer one"
                )
            units = _hide(filler, needles, case.depths, tokens)
            packed = _pack(units, self.chunk_tokens)
            groups = _spread(packed, count)
            if len(groups) == count:
                break
            # More chunks leave less room: so many as are packed now are enough.
            count = max(count + 1, len(packed))
        at = [0] * len(needles)
        order = prefix
        for group in groups:
            order += before
            for unit in group:
                if unit.needle >= 0:
                    at[unit.needle] = order
                order += len(unit.ids)
            order += around - before
        chunks = tuple(np.concatenate([unit.ids for unit in group]) for group in groups)
        return Fitted(case, chunks, lead, tuple(at), order + final)

    def markers(self) -> tuple[int, int]:
        """How many tokens the template puts before a chunk's text, and around it."""
        ids = self.template.chunk_ids(self.tokenizer, np.array([-1], np.int32))
        return int(np.flatnonzero(ids == -1)[0]), len(ids) - 1

    def _lead(self, case: Case) -> HostArray:
        if not (case.lead and self.with_lead):
            return np.zeros(0, np.int32)
        return in_text(self.tokenizer, (case.lead,), " ")[0]

    def _filler(self, case: Case, tokens: int) -> list[HostArray]:
        """Sentences of at least so many tokens together, and no fewer than ``case.least``."""
        source, units, total = case.filler(), list[HostArray](), 0
        while total < tokens or len(units) < case.least:
            missing = max(tokens - total, 0) * len(units) // max(total, 1)  # as long as these
            batch = list(itertools.islice(source, missing + 64))
            if not batch:
                raise RequestError(
                    f"the filler of this task ends after {total} tokens, {tokens} are needed; ask "
                    "for a shorter length"
                )
            if self.tokenizer.is_word_level:
                self._refuse_unknown(batch)
            ids = in_text(self.tokenizer, batch, case.glue)
            total += sum(map(len, ids))
            units += ids
        return units

    def _refuse_unknown(self, texts: Sequence[str]) -> None:
        if self.tokenizer.unk_id is None:
            return
        unknown = self.tokenizer.unknown_words("\n".join(texts))
        if unknown:
            raise RequestError(
                f"the model's vocabulary lacks {unknown[0]!r}, a word of the task; use the village "
                "flavour for a model of that language, or another model"
            )

    def _refuse_long(self, case: Case, needles: Sequence[HostArray]) -> None:
        assert self.chunk_tokens is not None
        for text, ids in zip(case.needles, needles, strict=True):
            if len(ids) > self.chunk_tokens:
                raise RequestError(
                    f"chunks of {self.chunk_tokens} tokens: {text[:40]!r} has {len(ids)} and is "
                    "not to be cut; use larger chunks"
                )


def in_text(tokenizer: Tokenizer, sentences: Sequence[str], glue: str) -> list[HostArray]:
    """Ids of each sentence as it has them between others, int32 [T], the glue before it included.

    Cut where characters end: a token that two sentences share goes to the earlier one.
    """
    parts = (sentences[-1], *sentences, sentences[0])
    ends = np.cumsum([len(part) + len(glue) for part in parts[:-1]]) - len(glue)
    ids, offsets = tokenizer.encode_with_offsets(glue.join(parts))
    reached = np.concatenate(([0], np.maximum.accumulate(offsets[:, 1])))[:-1]
    cuts = np.flatnonzero(offsets[:, 0] >= reached)
    firsts = cuts[np.searchsorted(reached[cuts], ends)]
    return [ids[a:b] for a, b in itertools.pairwise(firsts)]


def _hide(
    filler: Sequence[HostArray],
    needles: Sequence[HostArray],
    depths: Sequence[float],
    tokens: int,
) -> list[_Unit]:
    """So many tokens of filler, the last sentence cut, with the needles between its sentences.

    A needle stands at the last end of a sentence that is not beyond its depth; needles of the same
    place keep their order.
    """
    kept: list[HostArray] = []
    ends = [0]
    for ids in filler:
        if ends[-1] == tokens:
            break
        kept.append(ids[: tokens - ends[-1]])
        ends.append(ends[-1] + len(kept[-1]))
    assert ends[-1] == tokens
    places = np.searchsorted(ends, np.array(depths) * tokens, side="right") - 1
    by_place: dict[int, list[_Unit]] = {}
    for number, (ids, place) in enumerate(zip(needles, places, strict=True)):
        by_place.setdefault(int(place), []).append(_Unit(ids, number))
    units = [*by_place.get(0, ())]
    for place, ids in enumerate(kept, 1):
        units += (_Unit(ids, -1), *by_place.get(place, ()))
    return units


def _pack(units: Sequence[_Unit], chunk_tokens: int | None) -> list[list[_Unit]]:
    """Whole units in chunks, each as full as the next unit lets it be."""
    groups: list[list[_Unit]] = [[]]
    size = 0
    for unit in units:
        if chunk_tokens is not None and groups[-1] and size + len(unit.ids) > chunk_tokens:
            groups.append([])
            size = 0
        groups[-1].append(unit)
        size += len(unit.ids)
    return groups


def _spread(groups: list[list[_Unit]], count: int) -> list[list[_Unit]]:
    """The chunks, split until there are so many; fewer where no more can be split.

    One chunk fewer would leave room for the marks around it, and a longer haystack, which fills
    that room, needs the chunk.
    """
    groups = list(groups)
    while len(groups) < count:
        most = max(range(len(groups)), key=lambda i: len(groups[i]))
        group = groups[most]
        if len(group) == 1:  # of single sentences, the longest that is no needle is cut
            sizes = [len(group[0].ids) if group[0].needle < 0 else 0 for group in groups]
            most = int(np.argmax(sizes))
            if sizes[most] < 2:
                break
            group = [_Unit(half, -1) for half in np.array_split(groups[most][0].ids, 2)]
        groups[most : most + 1] = [group[: len(group) // 2], group[len(group) // 2 :]]
    return groups
