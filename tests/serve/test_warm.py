"""What was warmed up is not compiled again."""

import pytest
from refusal import refused

import jaxrag
from jaxrag.base.errors import RequestError
from jaxrag.engine.engine import engine_of
from jaxrag.models.model import random_model
from jaxrag.models.text.tokenizer import Tokenizer

QUESTIONS = ["Who carries the salt?", "What is carried by mules, and over which of the passes?"]


@pytest.fixture
def kb(tmp_path, tiny_config, tokenizer_dir):
    """Over a model of sizes that nobody else has compiled."""
    config = tiny_config(vocab_size=600, max_positions=1024, mlp_dim=88, num_layers=2)
    model = random_model(config, tokenizer=Tokenizer.load(tokenizer_dir), cache_tokens=4096)
    with jaxrag.KnowledgeBase.open(tmp_path / "kb", model, chunk_tokens=32, overlap=0) as kb:
        kb.add(["Salt is carried by mules. " * 8, "Tea is traded for salt. " * 8])
        yield kb


def test_questions_like_those_that_come(kb):
    warmed = jaxrag.warm_up(QUESTIONS, kb=kb, k=2, max_new_tokens=4)
    assert warmed.programs > 0 and warmed.prompts == 2 and warmed.seconds > 0
    engine = engine_of(kb.model)
    before = sum(engine.compiled.values())
    for question in QUESTIONS:
        out = jaxrag.generate(question, kb=kb, k=2, max_new_tokens=4)
        assert out.counts["encoded"] == 0
    assert sum(engine.compiled.values()) == before
    jaxrag.warm_up(QUESTIONS, kb=kb, k=2, max_new_tokens=4)
    assert sum(engine.compiled.values()) == before  # nothing was left to compile


def test_what_is_no_question_is_refused(kb):
    with refused(RequestError, "questions='Who?'"):
        jaxrag.warm_up("Who?", kb=kb)
    with refused(RequestError):
        jaxrag.warm_up()


@pytest.mark.slow
def test_questions_of_any_length(kb):
    warmed = jaxrag.warm_up(kb=kb, k=2, max_new_tokens=4, stream=True)
    assert warmed.programs > 0
    engine = engine_of(kb.model)
    compiled = engine.compiled.copy()
    for count in (1, 3, 9):
        for _ in jaxrag.generate("Who? " * count, kb=kb, k=2, max_new_tokens=4, stream=True):
            pass
    assert engine.compiled == compiled
