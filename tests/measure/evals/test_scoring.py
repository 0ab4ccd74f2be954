"""Packed scores against one forward pass a question, and against really answering."""

import dataclasses

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import ConfigError, RequestError, TokenizerError
from jaxrag.measure.evals.scoring import READS, draw, scored, write
from jaxrag.models.model import random_model
from jaxrag.models.segments import lay_out
from jaxrag.models.text.prompts import TEMPLATES
from jaxrag.models.text.tokenizer import Tokenizer
from jaxrag.serve.generate import generate
from jaxrag.tasks.synthetic import SyntheticTask, sample
from jaxrag.train.samples import Final

TASK = SyntheticTask(chunks=(3, 4), split="test")
LONGEST = 6


def alone(model, tokens, question, read):
    """Greedy answer of one question up to its end, by a whole forward pass for every token."""
    parts = (tokens.prefix, *tokens.chunks)
    ids = [int(i) for part in (*parts, question) for i in part]
    answer = []
    while len(answer) < LONGEST and (not answer or answer[-1] not in model.config.eos_ids):
        whole = np.array([ids + answer], np.int32)
        final = whole.shape[1] - sum(map(len, parts))
        layout = lay_out(len(parts[0]), [len(c) for c in parts[1:]], final, read.positions)
        padded = np.zeros((1, 256), np.int32)
        padded[:, : whole.shape[1]] = whole
        positions, segments = np.zeros_like(padded), np.zeros_like(padded)
        positions[:, : whole.shape[1]] = layout.positions
        segments[:, : whole.shape[1]] = 2 if read.full else layout.segments
        logits = np.asarray(model.logits(padded, positions, segments))
        answer.append(int(logits[0, whole.shape[1] - 1].argmax()))
    return answer


@pytest.fixture(scope="module")
def by_read(village_model):
    """Samples whose every second expected answer is what the model says when asked alone."""
    written = write(village_model, draw(TASK, 3, 12))
    ends = village_model.config.eos_ids
    made = {}
    for name, read in READS.items():
        ids, expected = [], []
        for tokens in written.ids:
            finals = []
            for final in tokens.finals:
                answer = alone(village_model, tokens, final.question, read)
                right = answer[-1] in ends and len(expected) % 2 == 0
                if not right:  # one word too many, somewhere before the end
                    at = len(expected) % len(answer)
                    answer.insert(at, next(i for i in range(answer[at] + 1, 600) if i not in ends))
                expected.append(right)
                finals.append(Final(final.question, np.array(answer, np.int32)))
            ids.append(dataclasses.replace(tokens, finals=tuple(finals)))
        made[name] = dataclasses.replace(written, ids=tuple(ids)), expected
    return made


@pytest.mark.parametrize("name", READS)
def test_packed_questions_score_as_they_do_alone(by_read, name):
    written, expected = by_read[name]
    heard = []
    found = scored(written, READS[name], heard.append)
    assert found.tolist() == expected
    assert 0 < sum(expected) < len(expected)  # both verdicts occur
    assert sum(heard) == len(written.samples)


@pytest.mark.parametrize("name", READS)
def test_answers_through_the_cache_agree_with_packed_scores(by_read, name):
    written, expected = by_read[name]
    found = []
    for sample_, tokens in zip(written.samples, written.ids, strict=True):
        for question, final in zip(sample_.questions, tokens.finals, strict=True):
            out = generate(
                question.question, documents=sample_.chunks, model=written.model,
                method=READS[name].method, template=written.template,
                max_new_tokens=len(final.response),
            )  # fmt: skip
            right = out.token_ids == final.response[:-1].tolist()
            found.append(right and out.finish_reason == "stop")
    assert found == expected


def test_reads_are_different_questions_to_the_model(by_read):
    """An answer that is right in one read is not so in all: the reads do differ."""
    written, expected = by_read["full"]
    assert scored(written, READS["block"]).tolist() != expected
    written, expected = by_read["block"]
    assert scored(written, READS["composite"]).tolist() != expected


def test_exactly_so_many_questions_are_drawn():
    drawn = draw(TASK, 3, 20)
    assert sum(len(one.questions) for one in drawn) == 20
    assert drawn[:-1] == tuple(sample(TASK, 3, i) for i in range(len(drawn) - 1))
    last = sample(TASK, 3, len(drawn) - 1)
    assert drawn[-1].questions == last.questions[: len(drawn[-1].questions)]


def test_composite_positions_need_a_model_without_a_window(tiny_config, village_model):
    config = tiny_config("mistral", vocab_size=600, num_layers=1)
    windowed = random_model(config, tokenizer=village_model.tokenizer, cache_tokens=2048)
    written = write(windowed, draw(TASK, 3, 2), village_model.template)
    assert len(scored(written, READS["block"])) == 2
    with refused(RequestError):
        scored(written, READS["composite"])


def test_what_cannot_be_asked_is_refused(village_model, text_model, tiny_config):
    samples = draw(TASK, 3, 2)
    marked = dataclasses.replace(TEMPLATES["plain"], prefix="<|passages|>")
    with refused(TokenizerError):
        write(text_model, samples, marked)
    without = random_model(tiny_config(vocab_size=600, num_layers=1), cache_tokens=1024)
    with refused(TokenizerError):
        write(without, samples, village_model.template)
    short = random_model(
        tiny_config(vocab_size=600, num_layers=1, max_positions=40),
        tokenizer=village_model.tokenizer,
        cache_tokens=1024,
    )
    with refused(RequestError, "40"):
        write(short, samples, village_model.template)
    unending = random_model(
        tiny_config(vocab_size=600, num_layers=1, eos_ids=()),
        tokenizer=Tokenizer.load(village_model.path),
        cache_tokens=1024,
    )
    unending.tokenizer.eos_ids = ()
    with refused(ConfigError):
        write(unending, samples, village_model.template)


def test_words_outside_the_vocabulary_are_named(village_model):
    (drawn,) = draw(TASK, 3, 1)
    foreign = dataclasses.replace(drawn, chunks=("The zeppelin is in Thornby.", *drawn.chunks))
    with refused(RequestError, "'zeppelin'"):
        write(village_model, [foreign])
