"""The engine: rows that end, admission by what is free, one owner of the pool, life and death."""

import ast
import dataclasses
import gc
import weakref
from pathlib import Path

import numpy as np
import pytest

import jaxrag
from jaxrag.cache import PAGE
from jaxrag.decode import rule_from
from jaxrag.engine.engine import Row, engine_of
from jaxrag.engine.request import Prompt, Request, reserved
from jaxrag.errors import RequestError
from jaxrag.methods import METHODS
from jaxrag.models.model import random_model

EOS = 0


def request(ids, model=None, method="full_attention", tokens=4):
    prompt = Prompt(np.zeros(0, np.int32), (), np.asarray(ids, np.int32))
    store = None if model is None else engine_of(model).memory
    return Request(prompt, store, METHODS[method], tokens, eos_ids=frozenset({EOS}))


@pytest.mark.parametrize(
    ("steps", "new", "reason"),
    [
        ([[5, 6]], [5, 6], None),
        ([[5, EOS, 7]], [5], "stop"),  # the end is no part of the answer, nor what follows it
        ([[EOS]], [], "stop"),
        ([[5], [6, 7, 8, 9]], [6, 7, 8], "length"),
        ([[5, 6, 7, EOS]], [5, 6, 7], "stop"),
        ([[5, 6, 7, 8], [9]], [], "length"),
    ],
)
def test_a_row_ends(steps, new, reason):
    row = Row(request([1]))
    for ids in steps:
        row.extend(ids)
    assert (row.new, row.finish_reason) == (new, reason)


@pytest.mark.parametrize(
    ("tokens", "block", "expected"), [(1, 8, 0), (2, 8, 8), (9, 8, 8), (10, 8, 16), (4, 1, 3)]
)
def test_slots_are_reserved_for_whole_blocks(tokens, block, expected):
    assert reserved(tokens, block) == expected


@pytest.fixture
def model(tiny_config):
    return random_model(tiny_config(), cache_tokens=512)


def test_requests_of_a_batch_share_their_method(model):
    both = [request([1, 2], model), request([1, 2], model, "turborag")]
    with pytest.raises(RequestError, match="share their method"):
        engine_of(model).run(both, 1)


def test_a_stopped_row_ends_its_batch(model):
    batch = engine_of(model).run([request([3, 4], model, tokens=9)], 1)
    seen = []
    for (row,) in batch:
        seen += row.new
        batch.stop(0)
    assert len(seen) == 1
    assert len(batch.outcomes) == 1


def test_admission_counts_what_is_free(model):
    """Beside a stream that holds pages, a batch is cut to what is left; alone it is not."""
    engine = engine_of(model)
    allocator = engine.runner.cache.allocator
    many = [request(range(1, 60), model) for _ in range(6)]  # 5 pages each, of 32
    assert [len(batch) for batch in engine.batches(many, 6)] == [6]
    rows = iter(engine.run([request(range(1, 99), model, tokens=PAGE * 12)], 1))
    next(rows)
    held = allocator.num_pages - allocator.num_available
    assert held > 8
    first = next(engine.batches(many, 6))
    assert len(first) == allocator.num_available // 5 < 6
    rows.close()
    assert allocator.num_free == allocator.num_pages


def test_unused_chunks_count_as_room(model, rng):
    engine = engine_of(model)
    documents = [rng.integers(3, 101, 40).tolist() for _ in range(3)]
    jaxrag.generate([5, 6], documents=documents, model=model, max_new_tokens=2)
    allocator = engine.runner.cache.allocator
    assert allocator.num_free < allocator.num_pages == allocator.num_available


@pytest.mark.parametrize("decode", ["dense", "retrieval:recent=8,sink=4"])
def test_a_deleted_model_frees_weights_and_pool(tiny_config, rng, decode):
    model = random_model(tiny_config(), cache_tokens=512)
    ids = rng.integers(3, 101, 40).tolist()
    options = {"documents": [], "method": "full_attention", "max_new_tokens": 3, "decode": decode}
    jaxrag.generate(ids, model=model, **options)
    runner = engine_of(model).runner
    held = [weakref.ref(x) for x in (model, runner.cache.pool.k, runner.cache.pool.v)]
    held += [weakref.ref(model.params.embed), weakref.ref(model.rope(1).cos)]
    host = runner.host_search  # a compiled step names it
    host.admit()
    del model, runner
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)
    assert not host._requests
    assert host._pool is None


def test_interleaved_streams_report_their_own_indexes(tiny_config, rng):
    model = random_model(tiny_config(), cache_tokens=2048)
    prompts = [rng.integers(3, 101, size).tolist() for size in (40, 90)]

    def batch(ids):
        rule = rule_from("retrieval:recent=8,sink=4")
        one = request(ids, model)
        one = dataclasses.replace(one, method=dataclasses.replace(one.method, decode=rule))
        return engine_of(model).run([one], 1)

    alone = [batch(ids) for ids in prompts]
    for one in alone:
        list(one)
    expected = [one.outcomes[0].indexes for one in alone]
    assert 0 < expected[0]["keys"] < expected[1]["keys"]
    both = [batch(ids) for ids in prompts]
    list(zip(*map(iter, both), strict=True))
    assert [one.outcomes[0].indexes for one in both] == expected


def test_the_pool_has_one_owner():
    """One place binds the pool anew, ``PagedCache.run``; nobody else assigns it."""
    root = Path(jaxrag.__file__).parent
    binds = []
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
                continue
            if node.attr == "pool" or (node.attr == "_pool" and path.parent.name == "cache"):
                binds.append((path.relative_to(root).as_posix(), node.attr))
    assert binds == [("cache/cache.py", "_pool")] * 2  # at the start, and in ``run``
