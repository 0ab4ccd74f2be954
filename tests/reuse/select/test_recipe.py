"""How to add a selector: one file with one class, and one line. CONTRIBUTING.md links here."""

import dataclasses
import itertools
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrag.base.sharding import to_host
from jaxrag.reuse.select import SELECTORS, Selector
from jaxrag.serve.generate import generate


# The file, such as jaxrag/reuse/select/middle_tokens.py; its docstring names the paper.
@dataclasses.dataclass(frozen=True)
class MiddleTokens(Selector):
    """The tokens nearest to the middle of their chunk, shifted by ``shift``; of no paper."""

    shift: int = 0
    name: str = dataclasses.field(default="middle", init=False)
    reads_cache: ClassVar[bool] = False

    def score(self, scene):
        """Minus the distance from the middle: [C]."""
        middle = np.repeat(scene.lengths, scene.lengths) / 2
        return -abs(scene.local + self.shift - middle)


# One that runs the model has ``observe`` beside it, over the prompt in a row that is padded.
@dataclasses.dataclass(frozen=True)
class LongEmbeddings(Selector):
    """The tokens whose embeddings are longest."""

    name: str = dataclasses.field(default="long", init=False)

    def observe(self, model, cache, scene):
        """The length of every chunk token's embedding: [C]."""
        ids, _ = scene.causal
        return scene.gather(to_host(jnp.linalg.norm(model.params.embed[ids], axis=-1)))

    def score(self, scene):
        return scene.observed


@pytest.fixture(autouse=True)
def the_line(monkeypatch):
    """The line of the table in jaxrag/reuse/select/__init__.py."""
    monkeypatch.setitem(SELECTORS, "middle", MiddleTokens)
    monkeypatch.setitem(SELECTORS, "long", LongEmbeddings)


@pytest.fixture
def method_file(tmp_path):
    """A method's file that names a selector with a setting."""
    path = tmp_path / "mine.toml"
    path.write_text(
        'encoder = "after_prefix"\nrecompute_ratio = 0.2\n[selector]\nname = "middle"\nshift = 1\n'
    )
    return str(path)


def test_answers_by_the_new_selector(model_of, work, method_file, rng):
    """By name and setting; at ratio 1 it is full attention, as every selector."""
    model = model_of("llama", eos_ids=())
    documents = [list(map(int, d)) for d in work.ids(rng, 20, 30)]
    options = {"documents": documents, "model": model, "max_new_tokens": 4}
    result = generate([5, 6, 7], method=method_file, **options)
    result = generate([5, 6, 7], method=method_file, **options)  # chunks are stored by now
    assert result.counts == {"reused": 40, "recomputed": 10, "encoded": 0}
    everything = generate([5, 6, 7], method=method_file, recompute_ratio=1, **options)
    full = generate([5, 6, 7], method="full_attention", **options)
    assert everything.token_ids == full.token_ids


def test_what_it_chooses(model_of, work, rng):
    """The best of the candidates: none of the first chunk, which is exact behind the prefix."""
    model, prompt = model_of(), work.prompt(rng)
    selectors = {name: SELECTORS[name]() for name in ("middle", "long")}
    chosen = {}
    for name, selector in selectors.items():
        _, (tokens,) = work.online(model, work.method(selector, 0.1), prompt)
        chosen[name] = tokens.tolist()
    starts = np.cumsum([0, *map(len, prompt.chunks)])
    middles = [(start + end) / 2 for start, end in itertools.pairwise(starts[1:])]
    distance = {t: min(abs(t - m) for m in middles) for t in range(37, 74)}
    assert len(chosen["middle"]) == 8 and 57 in chosen["middle"]
    assert max(distance[t] for t in chosen["middle"]) <= 2
    lengths = np.linalg.norm(np.asarray(model.params.embed), axis=-1)
    ids = np.concatenate(prompt.chunks)
    best = sorted(range(37, 74), key=lambda t: (-lengths[ids[t]], t))[:8]
    assert chosen["long"] == sorted(best)
