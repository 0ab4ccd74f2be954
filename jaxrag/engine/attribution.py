"""How much each token of an answer was chosen for what each chunk says."""

import dataclasses
from typing import NamedTuple

import numpy as np

from jaxrag.base.sharding import to_host
from jaxrag.base.types import Array, HostArray


class Attribution(NamedTuple):
    """Where the model looked when it chose each token, [tokens, chunks] float32 each.

    Attributes:
      votes: shares of the votes of all heads; rows sum to 1, or to 0 where no head looked at any.
      most: the most attention that a head gives the chunk, 0..1.
    """

    votes: HostArray
    most: HostArray


@dataclasses.dataclass
class PartialAttribution:
    """Of one run of an answer: pieces [T, C] on the device, and how many tokens they are of."""

    done: int = 0
    pieces: list[tuple[Array, Array]] = dataclasses.field(default_factory=list)

    def whole(self, num_chunks: int) -> Attribution:
        """Of every token, on the host."""
        parts = ([to_host(x) for x in part] for part in zip(*self.pieces, strict=True))
        votes, most = (np.concatenate(it)[: self.done, :num_chunks] for it in parts)
        total = votes.sum(-1, keepdims=True)
        return Attribution(np.divide(votes, total, out=np.zeros_like(votes), where=total > 0), most)
