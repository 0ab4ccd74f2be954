"""Who asks what and when: requests of an open loop, drawn from a seed.

A client of an open loop sends at times that were drawn before, whatever became of earlier
requests, so that a server that falls behind is measured with its queue. The gaps between arrivals
are exponential (a Poisson process); at another rate the same requests come in the same order,
nearer together or farther apart.

Documents are asked for as often as Zipf's law has it, and those of one question tend to be of one
topic. Their token ids are random.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxrag.base.types import HostArray
from jaxrag.engine.request import Prompt
from jaxrag.measure.bench.options import Traffic

_ARRIVALS, _DOCUMENTS, _REQUESTS = range(3)  # streams of random numbers


@dataclasses.dataclass(frozen=True, eq=False)
class AskedRequest:
    """One request of the workload.

    Attributes:
      number: counts them from 0.
      due: when it comes, in seconds at one request a second.
      prompt: token ids, with the neighbours of every chunk.
    """

    number: int
    due: float
    prompt: Prompt
    tokens: int

    def at(self, rate: float) -> float:
        """When it comes at so many requests a second, in seconds after the start."""
        return 0.0 if math.isinf(rate) else self.due / rate


def draw(traffic: Traffic, vocab_size: int) -> list[AskedRequest]:
    """All requests by time. The first n are the same whatever ``requests`` is."""
    library = documents(traffic, vocab_size)
    neighbours = [_neighbours(traffic, library, at) for at in range(traffic.documents)]
    popular = np.arange(1, traffic.documents + 1) ** -traffic.zipf
    due = _arrivals(traffic)
    asked = []
    for number in range(traffic.requests):
        rng = np.random.default_rng((traffic.seed, _REQUESTS, number))
        chosen = _choose(traffic, popular, rng)
        prompt = Prompt(
            np.zeros(0, np.int32),
            tuple(library[at] for at in chosen),
            _ids(rng, traffic.question, vocab_size),
            tuple(neighbours[at] for at in chosen),
        )
        asked.append(AskedRequest(number, due[number], prompt, int(rng.choice(traffic.answers))))
    return asked


def like(traffic: Traffic, vocab_size: int, count: int) -> list[AskedRequest]:
    """Requests of every length of an answer, ``count`` of each, over documents of their own."""
    lengths = sorted(set(traffic.answers)) * count
    other = dataclasses.replace(
        traffic, requests=len(lengths), documents=traffic.chunks + traffic.neighbours,
        seed=traffic.seed + 1_000_003,
    )  # fmt: skip
    drawn = draw(other, vocab_size)
    return [dataclasses.replace(it, tokens=n) for it, n in zip(drawn, lengths, strict=True)]


def _arrivals(traffic: Traffic) -> list[float]:
    """Seconds at one request a second."""
    rng = np.random.default_rng((traffic.seed, _ARRIVALS))
    times: list[float] = np.cumsum(rng.exponential(1.0, traffic.requests)).tolist()
    return times


def documents(traffic: Traffic, vocab_size: int) -> list[HostArray]:
    """Token ids of every document, the most popular first, int32 [chunk_tokens] each."""
    rng = np.random.default_rng((traffic.seed, _DOCUMENTS))
    return [_ids(rng, traffic.chunk_tokens, vocab_size) for _ in range(traffic.documents)]


def _ids(rng: np.random.Generator, count: int, vocab_size: int) -> HostArray:
    return rng.integers(3, vocab_size, count).astype(np.int32)


def _neighbours(traffic: Traffic, library: Sequence[HostArray], at: int) -> tuple[HostArray, ...]:
    """The most popular others of a document's topic, then of any."""
    of_topic = range(at % traffic.topics, traffic.documents, traffic.topics)
    others = [i for i in dict.fromkeys((*of_topic, *range(traffic.documents))) if i != at]
    return tuple(library[i] for i in others[: traffic.neighbours])


def _choose(traffic: Traffic, popular: HostArray, rng: np.random.Generator) -> list[int]:
    """The documents of one request; each is as popular over many requests as it is said to be."""
    topic = int(rng.choice(traffic.documents, p=popular / popular.sum())) % traffic.topics
    topical = np.arange(traffic.documents) % traffic.topics == topic
    chosen: list[int] = []
    while len(chosen) < traffic.chunks:
        weight = np.where(topical, popular, 0.0) if rng.random() < traffic.focus else popular.copy()
        weight[chosen] = 0.0
        if not weight.any():  # the topic has no more
            weight = popular.copy()
            weight[chosen] = 0.0
        chosen.append(int(rng.choice(traffic.documents, p=weight / weight.sum())))
    return chosen
