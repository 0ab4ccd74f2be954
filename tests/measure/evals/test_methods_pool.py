"""What prompts are made of: all chunks of a sample, or those that a search finds."""

import contextlib
import dataclasses

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import RequestError
from jaxrag.measure.evals.methods_pool import open_pool
from jaxrag.measure.evals.options import MethodsOptions
from jaxrag.measure.evals.scoring import draw, write
from jaxrag.reuse.methods import METHODS
from jaxrag.tasks.synthetic import SyntheticTask


@pytest.fixture(scope="module")
def pool_of(village_model, tmp_path_factory):
    """``pool_of(retrieve)``: 20 questions on two or so samples of eight chunks; made once."""
    made = {}
    with contextlib.ExitStack() as stack:

        def make(retrieve, **changes):
            if retrieve in made and not changes:
                return made[retrieve]
            task = SyntheticTask(chunks=(8, 8), split="test", questions=12)
            options = MethodsOptions(
                "m", ("fusionrag",), neighbours=2, task=task, questions=20, retrieve=retrieve,
            )  # fmt: skip
            samples = draw(task, options.seed, options.questions)
            written = write(village_model, samples, chunks=retrieve)
            written = dataclasses.replace(written, **changes)
            methods = [METHODS["fusionrag"], METHODS["full_reuse"]]
            folder = str(tmp_path_factory.mktemp("pool"))
            pool = open_pool(options, written, methods, folder, progress=False)
            for kb in pool.kbs:
                stack.enter_context(kb)
            return made.setdefault(retrieve, pool)

        yield make


def texts_of(ready):
    return [source.text for source in ready.sources]


def test_given_chunks_stand_in_their_order(pool_of):
    pool = pool_of(None)
    ((_, asked),) = pool.asked(METHODS["full_reuse"])
    samples = [s for s in pool.written.samples for _ in s.questions]
    assert len(asked) == 20 and len(pool.kbs) == 1
    assert [texts_of(one) for one in asked] == [list(sample.chunks) for sample in samples]
    assert all(one.prompt.neighbours is None for one in asked)


def test_retrieved_chunks_are_what_a_search_in_the_sample_finds(pool_of):
    """Best person first, the chunks about one person in the order in which they were written."""
    pool = pool_of(3)
    groups = list(pool.asked(METHODS["fusionrag"]))
    assert len(groups) == len(pool.kbs) == len(pool.written.samples) > 1
    for (_, asked), kb, sample in zip(groups, pool.kbs, pool.written.samples, strict=True):
        for one, question in zip(asked, sample.questions, strict=True):
            found = [hit.text for hit in kb.search(question.question, k=3, mode="bm25")]
            shown = texts_of(one)
            assert sorted(shown) == sorted(found) and 1 <= len(shown) <= 3
            numbers = [sample.chunks.index(text) for text in shown]
            people = [sample.subjects[i] for i in numbers]
            ranked = list(dict.fromkeys(sample.subjects[sample.chunks.index(t)] for t in found))
            assert list(dict.fromkeys(people)) == ranked
            assert numbers == sorted(numbers, key=lambda i: (ranked.index(sample.subjects[i]), i))


def test_a_chunk_that_says_she_is_found_by_her_name(pool_of):
    """The title is searched, and stands in no prompt."""
    pool = pool_of(3)
    hidden = [
        (number, i)
        for number, sample in enumerate(pool.written.samples)
        for i, text in enumerate(sample.chunks)
        if sample.subjects[i] not in text
    ]
    assert hidden
    for number, i in hidden:
        sample = pool.written.samples[number]
        found = pool.kbs[number].search(sample.subjects[i], k=8, mode="bm25")
        assert sample.chunks[i] in [hit.text for hit in found]
    for _, asked in pool.asked(METHODS["full_reuse"]):
        template, tokenizer = pool.written.template, pool.written.model.text_tokenizer()
        for one in asked:
            shown = [template.chunk_ids(tokenizer, tokenizer.encode(t)) for t in texts_of(one)]
            for ids, text_ids in zip(one.prompt.chunks, shown, strict=True):
                np.testing.assert_array_equal(ids, text_ids)


def test_titles_that_would_stand_in_the_prompt_are_refused(pool_of, village_model):
    template = dataclasses.replace(village_model.template, chunk="{title}: {text}")
    with refused(RequestError):
        pool_of(3, template=template)
