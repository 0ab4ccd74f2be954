"""Packets: trained vectors around each chunk, which stay in its KV (KV Packet, arXiv:2604.13226).

The weights stay as they are and nothing is computed again. Other than a primer's, the vectors are
in the prompt, and the question sees them.

  encoded:  prefix | header, c1, trailer                            sees prefix and itself
            prefix | header, c2, trailer                            the same
  answered: prefix | header, c1, trailer | header, c2, trailer | question
"""

import numpy as np

from jaxrag.base.types import HostArray


def wrapped(ids: HostArray, vocab_size: int, header: int, count: int) -> HostArray:
    """A chunk's ids [T] with those of vectors around it, int32 [T + count].

    The vectors are read as ids from the vocabulary's size on (``Model.with_soft``): the first
    ``header`` of ``count`` stand in front, the others behind.
    """
    soft = np.arange(vocab_size, vocab_size + count, dtype=np.int32)
    return np.concatenate((soft[:header], ids, soft[header:])).astype(np.int32)
