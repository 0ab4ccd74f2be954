"""Tokens drawn at random: what any method of choosing has to beat; a baseline of no paper."""

import dataclasses
from typing import ClassVar

import numpy as np
import xxhash

from jaxrag.base.types import HostArray
from jaxrag.reuse.select.base import SelectionInput, Selector


@dataclasses.dataclass(frozen=True)
class RandomTokens(Selector):
    """Uniform over the candidates. The same request and seed draw the same tokens."""

    seed: int = 0
    name: str = dataclasses.field(default="random", init=False)
    reads_cache: ClassVar[bool] = False

    def score(self, scene: SelectionInput) -> HostArray:
        """Numbers of a generator that is seeded by the seed and the request's token ids."""
        digest = xxhash.xxh3_64()
        for ids in (scene.prefix, *scene.chunks, scene.final):
            digest.update(len(ids).to_bytes(8, "little") + ids.astype("<i4").tobytes())
        return np.random.default_rng((self.seed, digest.intdigest())).random(scene.num_chunk_tokens)
