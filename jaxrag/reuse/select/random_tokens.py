"""Tokens drawn at random: what any method of choosing has to beat; a baseline of no paper."""

import dataclasses
from collections.abc import Sequence
from typing import override

import numpy as np
import xxhash

from jaxrag.kv.cache import PagedCache
from jaxrag.models.model import Model
from jaxrag.reuse.select.base import Choice, SelectionInput, Selector, best


@dataclasses.dataclass(frozen=True)
class RandomTokens(Selector):
    """Uniform over the candidates. The same request and seed draw the same tokens."""

    seed: int = 0
    name: str = dataclasses.field(default="random", init=False)

    @property
    @override
    def reads_cache(self) -> bool:
        return False

    def select(
        self, model: Model, cache: PagedCache, scenes: Sequence[SelectionInput]
    ) -> list[Choice]:
        """Draw from a generator that is seeded by the seed and the request's token ids."""
        return [Choice(best(self._draw(scene), scene.candidates, scene.budget)) for scene in scenes]

    def _draw(self, scene: SelectionInput) -> np.ndarray:
        digest = xxhash.xxh3_64()
        for ids in (scene.prefix, *scene.chunks, scene.final):
            digest.update(len(ids).to_bytes(8, "little") + ids.astype("<i4").tobytes())
        return np.random.default_rng((self.seed, digest.intdigest())).random(scene.num_chunk_tokens)
