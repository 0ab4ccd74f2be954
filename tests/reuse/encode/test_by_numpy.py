"""What the engine answers, method by method, beside the papers' equations in numpy."""

import numpy as np
import pytest
from numpy_llama import logits_of
from numpy_methods import Methods, kl

from jaxrag.engine.request import Prompt, Request
from jaxrag.kv.store import MemoryStore
from jaxrag.models.model import random_model
from jaxrag.reuse.methods import METHODS, Method

FUSION = METHODS["fusionrag"]
ASKED = {
    "full_attention": (METHODS["full_attention"], lambda it, x: it.whole(x[0], *x[1], x[2])),
    "isolated": (METHODS["turborag"], lambda it, x: it.isolated(x)),
    "after_prefix": (METHODS["full_reuse"], lambda it, x: it.after_prefix(x)),
    "primed": (METHODS["primed"], lambda it, x: it.primed(x, PRIMER)),
    "neighbours": (
        Method("neighbours", encoder="neighbours", first_encoder="after_prefix"),
        lambda it, x: it.neighbours(x, NEAR),
    ),
    "cacheblend": (METHODS["cacheblend"].with_ratio(0.3), lambda it, x: it.cacheblend(x, 0.3)),
    "fusionrag": (FUSION.with_ratio(0.3), lambda it, x: it.fusionrag(x, NEAR, 0.3)),
}


def drawn(*lengths):
    return [np.random.default_rng(n).integers(3, 101, n).astype(np.int32) for n in lengths]


PREFIX, PRIMER, ONE, TWO, THREE, FINAL = drawn(5, 19, 14, 23, 11, 7)
CHUNKS, PROMPT = (ONE, TWO, THREE), (PREFIX, (ONE, TWO, THREE), FINAL)
NEAR = ((TWO, THREE), (THREE, ONE), tuple(drawn(8, 17)))


@pytest.fixture(scope="module")
def model(tiny_config):
    return random_model(tiny_config("llama"), seed=4, cache_tokens=2048)


@pytest.fixture(scope="module")
def answers(model):
    llama = Methods(model)
    return {name: ask(llama, PROMPT).logits for name, (_, ask) in ASKED.items()}


@pytest.mark.parametrize("name", ASKED)
def test_the_next_token_is_that_of_the_papers_equations(model, answers, name):
    """And of no other method's: what tells methods apart is far larger."""
    method, _ = ASKED[name]
    prompt = Prompt(PREFIX, CHUNKS, FINAL, neighbours=NEAR)
    store = MemoryStore(model.fingerprint, model.kv_layout)
    primer = PRIMER if method.sees_primer else None
    found = logits_of(model, Request(prompt, store, method, 4, primer=primer))
    apart = {other: kl(logits, found) for other, logits in answers.items()}
    assert abs(apart.pop(name)) <= 1e-8
    assert min(apart.values()) > 1e-6, apart
