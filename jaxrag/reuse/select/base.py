"""What a selector is: settings, and a score for every chunk token.

Budgets, the layout of a prompt and the choice of the best tokens are the same for all.
"""

import abc
import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import RequestError
from jaxrag.base.shapes import row_length
from jaxrag.base.types import EMPTY, FINAL, Array, HostArray, Tokens
from jaxrag.kv.cache import PAGE, PagedCache, TableBuilder
from jaxrag.models.model import Model


@dataclasses.dataclass(frozen=True)
class SelectionInput:
    """One request before anything is recomputed: its tokens, and its chunks' KV in the pool.

    Chunk tokens are counted through all chunks in prompt order: 0 .. C-1. Token c stands at
    position ``len(prefix) + c`` of the prompt (positions are reordered wherever anything is
    recomputed).

    Attributes:
      prefix: int32 token ids.
      chunks: the same of every chunk.
      final: the same of the final block.
      question: where the question's own tokens stand in it, the first and one past the last.
      table: pages of the prefix and the chunks, then ``scratch`` pages of the request's own.
      chunk_slots: [C] int32 slot of each chunk token in the table.
      scratch: first slot of the request's own pages; free until the selection is done.
      copies: for each chunk as many pages of the request's own as it lies in, for a selector that
        ``rewrites``; () of chunks that are settled, and for other selectors.
      exact: whether a chunk's KV already is what full attention would compute; then no token of it
        is ever chosen.
      in_place: whether a chunk is not in the pool and all of it is computed with this request; no
        token of it is chosen, and its slots hold nothing yet.
      seen: for each chunk, which chunks of this prompt its KV saw when it was encoded, in the order
        in which they stood then.
      ratio: share of the chunk tokens to recompute; None leaves the number to the selector.
      said: tokens of earlier turns of a conversation, which stand among the chunks, in place; the
        ratio is not of these.
      ahead: what ``Selector.ahead`` made of the final block; None where it was not asked.
      observed: what ``Selector.observe`` found with the model; None for a selector that does not.
    """

    prefix: HostArray
    chunks: tuple[HostArray, ...]
    final: HostArray
    question: tuple[int, int]
    table: TableBuilder
    chunk_slots: HostArray
    scratch: int
    copies: tuple[tuple[int, ...], ...]
    exact: tuple[bool, ...]
    in_place: tuple[bool, ...]
    seen: tuple[tuple[int, ...], ...]
    ratio: float | None
    said: int = 0
    ahead: Any = None
    observed: Any = None

    @property
    def lengths(self) -> list[int]:
        """Tokens of every chunk."""
        return [len(chunk) for chunk in self.chunks]

    @property
    def num_chunk_tokens(self) -> int:
        """Tokens of all chunks together, C."""
        return sum(self.lengths)

    @functools.cached_property
    def chunk_of(self) -> HostArray:
        """[C] the chunk of every chunk token."""
        return np.repeat(np.arange(len(self.chunks)), self.lengths)

    @functools.cached_property
    def local(self) -> HostArray:
        """[C] the place of every chunk token inside its chunk."""
        return np.concatenate([np.zeros(0, np.int64), *map(np.arange, self.lengths)])

    @functools.cached_property
    def candidates(self) -> HostArray:
        """[C] bool: may the token be chosen?"""
        return np.repeat(np.logical_not(self.settled), self.lengths)

    @property
    def settled(self) -> tuple[bool, ...]:
        """Whether there is nothing to choose in a chunk: it is exact, or all of it is computed."""
        return tuple(map(operator.or_, self.exact, self.in_place))

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of prefix and chunks."""
        return len(self.prefix) + self.num_chunk_tokens

    @property
    def causal(self) -> tuple[HostArray, HostArray]:
        """Prefix and chunks as one causal block: ids and segments [1, T] int32."""
        ids = self._row(np.concatenate((self.prefix, *self.chunks)), 0, 0)
        return ids, self._row(FINAL, 0, EMPTY)

    def spread(self, values: HostArray, fill: int = 0) -> HostArray:
        """Values of chunk tokens [C] where ``causal`` has the tokens, else ``fill``."""
        return self._row(values, len(self.prefix), fill)

    def gather(self, rows: HostArray) -> HostArray:
        """What was found of the chunk tokens of ``causal``: [1, T, ...] to [C, ...]."""
        return rows[0, len(self.prefix) : self.num_prompt_tokens]

    def _row(self, values: HostArray | int, first: int, fill: int) -> HostArray:
        out = np.full((1, row_length(self.num_prompt_tokens)), fill, np.int32)
        out[0, first : self.num_prompt_tokens] = values
        return out

    @property
    def budget(self) -> int:
        """Tokens to choose where ``ratio`` says so."""
        assert self.ratio is not None
        share = budget_of(self.ratio, self.num_chunk_tokens - self.said)
        return min(share, int(self.candidates.sum()))

    def first_page(self, chunk: int) -> int:
        """The table's page at which a chunk begins; its other pages follow."""
        start = sum(self.lengths[:chunk])
        return int(self.chunk_slots[start]) // PAGE

    @property
    def copied_pages(self) -> dict[int, tuple[int, ...]]:
        """By the table's page at which a chunk begins, the pages that take its copy."""
        return {self.first_page(i): pages for i, pages in enumerate(self.copies) if pages}


@dataclasses.dataclass(frozen=True)
class Selection:
    """What a selector found.

    Attributes:
      tokens: the chunk tokens to recompute, ascending, [R] int64.
      copied: the KV of the chunks was copied to the request's ``copies``, and changed there.
    """

    tokens: HostArray
    flops: int = 0
    copied: bool = False


@dataclasses.dataclass(frozen=True)
class Selector(abc.ABC):
    """Chooses the tokens to recompute. A selector is its settings: frozen, comparable, hashable.

    Attributes:
      name: the key of SELECTORS; a field, so that a record of the settings says what they are of.
      reads_cache: does it read cached KV?
    """

    name: str = dataclasses.field(init=False)
    reads_cache: ClassVar[bool] = True

    @property
    def reads_values(self) -> bool:
        """Does it attend to cached V on the device, in layers that may have theirs elsewhere?"""
        return False

    @property
    def rewrites(self) -> bool:
        """Does it change the KV of tokens that it does not choose, in copies of their pages?"""
        return False

    def check_ratio(self, ratio: float | None) -> None:
        """Refuse a recompute ratio that makes no sense here (RequestError)."""
        check_range(ratio)
        if ratio is None:
            raise RequestError(
                f"selector {self.name!r} needs a recompute_ratio, such as 0.15; got None"
            )

    def check(self, config: ModelConfig) -> None:  # noqa: B027  most have nothing to refuse
        """Refuse a model that this selector cannot work on (RequestError)."""

    def room(self, lengths: Sequence[int], ratio: float | None) -> int:
        """Most slots of its own that a request needs for chunks of these lengths."""
        return sum(lengths) if ratio is None else budget_of(ratio, sum(lengths))

    @property
    def reads_question(self) -> bool:
        """It runs the final block, or what of it is the question."""
        return False

    def ahead(self, model: Model, final: HostArray) -> Any:
        """What needs the final block alone, and can be computed while chunks are on their way.

        None where there is nothing of the kind. ``observe`` computes itself what it is not given,
        with the same bits.
        """
        return None

    def observe(self, model: Model, cache: PagedCache, scene: SelectionInput) -> Any:
        """What the scores need that the model has to be run for: ``SelectionInput.observed``."""
        return None

    @abc.abstractmethod
    def score(self, scene: SelectionInput) -> HostArray:
        """How much every chunk token wants to be recomputed: [C] float, deterministic."""

    def count(self, scene: SelectionInput) -> int | Sequence[int] | HostArray:
        """How many tokens of all chunks are chosen, or how many of each chunk."""
        return scene.budget

    def flops(self, model: Model, scene: SelectionInput) -> int:
        """Spent on ``observe`` for a request."""
        return 0

    def select(self, model: Model, cache: PagedCache, scene: SelectionInput) -> Selection:
        """Choose the candidates with the highest scores."""
        scene = dataclasses.replace(scene, observed=self.observe(model, cache, scene))
        return Selection(self._best(scene), self.flops(model, scene), self.rewrites)

    def _best(self, scene: SelectionInput) -> HostArray:
        scores, counts = self.score(scene), self.count(scene)
        if isinstance(counts, int):
            return best(scores, scene.candidates, counts)
        parts = [
            best(scores, scene.candidates & (scene.chunk_of == chunk), int(count))
            for chunk, count in enumerate(counts)
        ]
        return np.concatenate(parts)


def put_row(model: Model, *arrays: HostArray) -> list[Array]:
    """Arrays [1, ...] of a request on the device."""
    return [model.put_batch(x, 1) for x in arrays]


def in_order(ids: Array, segments: Array) -> Tokens:
    """Rows of tokens [B, T] at positions that are their order."""
    order = jnp.arange(ids.shape[1], dtype=jnp.int32)
    return Tokens(ids=ids, positions=jnp.broadcast_to(order, ids.shape), segments=segments)


def budget_of(ratio: float, num_tokens: int) -> int:
    """ceil(ratio x tokens), of the decimal number that was written: 0.07 x 100 is 7."""
    return math.ceil(Decimal(repr(ratio)) * num_tokens)


def check_range(ratio: float | None) -> None:
    """RequestError unless 0 <= ratio <= 1 (or None)."""
    if ratio is not None and not 0 <= ratio <= 1:
        raise RequestError(f"recompute_ratio={ratio}: expected a number from 0 to 1, such as 0.15")


def best(scores: HostArray, candidates: HostArray, budget: int) -> HostArray:
    """Indices of the ``budget`` highest scores [C] among the candidates, ascending.

    Ties go to the earlier token.
    """
    among = np.flatnonzero(candidates)
    order = np.argsort(-scores[among].astype(np.float64), kind="stable")
    return np.sort(among[order[:budget]])
