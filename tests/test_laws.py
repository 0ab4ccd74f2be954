"""The laws of the core, on random models of every family with unequal sizes, in float32."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import ConfigError, RequestError
from jaxrag.base.shapes import bucket
from jaxrag.base.sharding import make_mesh
from jaxrag.base.types import HIDDEN
from jaxrag.engine import decoding as answer
from jaxrag.engine import prefill
from jaxrag.engine import staging as load
from jaxrag.engine.engine import engine_of
from jaxrag.engine.prefilled import prefilled
from jaxrag.engine.request import Prompt, Request
from jaxrag.kv.cache import PAGE
from jaxrag.models.model import random_model
from jaxrag.models.segments import lay_out
from jaxrag.reuse.encode import chunk_key, encode_chunks
from jaxrag.reuse.methods import METHODS, Method
from jaxrag.serve.generate import generate

ALWAYS = ("llama", "mistral", "glm4")  # the others, whose parts these have, with the slow tests
FAMILIES = [*ALWAYS, *(pytest.param(x, marks=pytest.mark.slow) for x in ("qwen2", "qwen3", "glm"))]
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


@pytest.fixture(scope="module")
def model_of(tiny_config):
    """Random models by family and changes, made once: compiled functions are shared by config."""
    made = {}

    def make(family="llama", **changes):
        key = (family, *sorted(changes.items()))
        if key not in made:
            made[key] = random_model(tiny_config(family, **changes), cache_tokens=2048)
        return made[key]

    return make


def ids(rng, *lengths):
    return tuple(rng.integers(3, 101, n).astype(np.int32) for n in lengths)


def a_prompt(rng, prefix=5, chunks=(37, 20, 1, 16), final=9):
    return Prompt(ids(rng, prefix)[0], ids(rng, *chunks), ids(rng, final)[0])


def online_logits(model, method, prompt):
    """Logits of the last token through pool and page tables."""
    method = METHODS[method] if isinstance(method, str) else method
    [(_, logits, _)] = served(model, method, [prompt])
    return logits


def served(model, method, prompts):
    """Of each prompt where its parts lay, its last token's logits, and how many slots were shown.

    All ask at once, of one program where their shapes are alike.
    """
    engine, rows = engine_of(model), bucket(len(prompts), 1)
    requests = [Request(prompt, engine.memory, method, 1, rows=rows) for prompt in prompts]

    def seen(runner, state, there):
        shown = int(np.asarray(there.table.slot_position != HIDDEN).sum())
        return state, np.asarray(there.logits)[0], shown

    return prefilled(engine, requests, seen)


def packed_logits(model, prompt, scheme, prefix_visible=False, full=False):
    """Logits of the last token by one packed forward without a cache."""
    whole = np.concatenate((prompt.prefix, *prompt.chunks, prompt.final))[None]
    if full:
        return np.asarray(model.logits(whole)[0, -1])
    layout = lay_out(len(prompt.prefix), [len(c) for c in prompt.chunks], len(prompt.final), scheme)
    logits = model.logits(whole, layout.positions[None], layout.segments[None], prefix_visible)
    return np.asarray(logits[0, -1])


@pytest.mark.parametrize("family", FAMILIES)
def test_law_2_cached_equals_packed(rng, model_of, family):
    model, prompt = model_of(family), a_prompt(rng)
    full = online_logits(model, "full_attention", prompt)
    np.testing.assert_allclose(full, packed_logits(model, prompt, "reordered", full=True), **CLOSE)
    for method, scheme in (("turborag", "reordered"), ("turborag_composite", "composite")):
        if scheme == "composite" and model.config.sliding_window:
            continue
        expected = packed_logits(model, prompt, scheme)
        np.testing.assert_allclose(online_logits(model, method, prompt), expected, **CLOSE)


def test_law_2_with_windows_in_some_layers(rng, model_of):
    model = model_of("qwen2", sliding_window=6, window_layers=(False, True, False))
    prompt = a_prompt(rng)
    expected = packed_logits(model, prompt, "reordered")
    np.testing.assert_allclose(online_logits(model, "turborag", prompt), expected, **CLOSE)


def test_law_2_with_yarn_over_a_part_of_the_head(rng, model_of, yarn_rope):
    """YaRN's attention factor is on q in both forwards, and on the rotary dims only."""
    model, prompt = model_of(rope=yarn_rope), a_prompt(rng)
    for method in ("full_attention", "turborag"):
        expected = packed_logits(model, prompt, "reordered", full=method == "full_attention")
        np.testing.assert_allclose(online_logits(model, method, prompt), expected, **CLOSE)


def test_law_2_after_prefix_is_exact_for_one_chunk(rng, model_of):
    model, prompt = model_of(), a_prompt(rng, chunks=(40,))
    expected = packed_logits(model, prompt, "reordered", prefix_visible=True)
    np.testing.assert_allclose(online_logits(model, "full_reuse", prompt), expected, **CLOSE)


@pytest.mark.parametrize("method", ["turborag", "turborag_composite", "block_attention"])
def test_law_3_single_chunk_without_prefix_is_full_attention(rng, model_of, method):
    model, prompt = model_of(), a_prompt(rng, prefix=0, chunks=(45,))
    expected = packed_logits(model, prompt, "reordered", full=True)
    np.testing.assert_allclose(online_logits(model, method, prompt), expected, **CLOSE)


def test_law_3_single_chunk_behind_the_prefix_is_full_attention(rng, model_of):
    model, prompt = model_of(), a_prompt(rng, chunks=(45,))
    expected = packed_logits(model, prompt, "reordered", full=True)
    np.testing.assert_allclose(online_logits(model, "full_reuse", prompt), expected, **CLOSE)


def test_methods_differ_where_they_should(rng, model_of):
    """Reordered, composite, full reuse and full attention are four different computations."""
    model, prompt = model_of(), a_prompt(rng)
    names = ("full_attention", "full_reuse", "turborag", "turborag_composite")
    outs = [online_logits(model, name, prompt) for name in names]
    for i, one in enumerate(outs):
        for other in outs[:i]:
            assert np.abs(one - other).max() > 1e-2


def test_law_4_later_tokens_change_nothing(rng, model_of):
    """A computed token never sees a later one: its logits stay, whatever follows."""
    model = model_of()
    (chunk, final) = ids(rng, 24, 12)
    changed = final.copy()
    changed[6:] = 3 + (changed[6:] + 5) % 90
    whole = [np.concatenate((chunk, tail))[None] for tail in (final, changed)]
    layout = lay_out(0, [24], 12)
    first, second = (
        np.asarray(model.logits(w, layout.positions[None], layout.segments[None])) for w in whole
    )
    np.testing.assert_array_equal(first[0, :30], second[0, :30])
    assert np.abs(first[0, 30:] - second[0, 30:]).max() > 1e-2
    cut = [Prompt(chunk[:0], (chunk,), tail[:6]) for tail in (final, changed)]
    first, second = (online_logits(model, "turborag", prompt) for prompt in cut)
    np.testing.assert_array_equal(first, second)


def test_law_5_one_copy_serves_two_places(rng, model_of):
    model = model_of("qwen3")
    shared, other, one, two = ids(rng, 33, 21, 7, 7)
    empty = shared[:0]
    first = Prompt(empty, (shared, other), one)
    second = Prompt(empty, (other, other, shared), two)
    together = served(model, METHODS["turborag"], [first, second])
    pages = [
        set(state.parts[1 + at].resident.pages)
        for (state, *_), at in zip(together, (0, 2), strict=True)
    ]
    assert pages[0] == pages[1]
    for (_, logits, _), prompt in zip(together, (first, second), strict=True):
        np.testing.assert_allclose(logits, packed_logits(model, prompt, "reordered"), **CLOSE)


def test_law_12_a_batch_equals_one_at_a_time(rng, model_of):
    model = model_of()
    documents = [[int(t) for t in d] for d in ids(rng, 30, 17, 44)]
    questions = [list(map(int, q)) for q in ids(rng, 9, 3, 30, 1)]
    for method in ("full_attention", "turborag", "turborag_composite", "full_reuse"):
        options = {"documents": documents, "model": model, "method": method, "max_new_tokens": 7}
        batch = generate(questions, **options)
        for question, together in zip(questions, batch, strict=True):
            alone = generate(question, **options)
            assert together.token_ids == alone.token_ids
            assert together.finish_reason == alone.finish_reason


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_decode_equals_repeated_prefill(rng, model_of, family):
    """Decoding through pages gives the tokens that whole forwards without a cache give."""
    model = model_of(family, eos_ids=())
    (document, question) = ids(rng, 40, 6)
    out = generate(question, documents=[document], model=model, method="full_attention",
                   max_new_tokens=11)  # fmt: skip
    whole = list(np.concatenate((document, question)))
    for token in out.token_ids:
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(whole)] = whole
        segments = np.where(np.arange(64) < len(whole), 2, 0)[None]
        assert (
            int(np.asarray(model.logits(padded, segments=segments))[0, len(whole) - 1].argmax())
            == token
        )
        whole.append(token)
    assert out.finish_reason == "length" and len(out.token_ids) == 11


@pytest.mark.slow  # decode/test_laws.py has it for every rule
def test_law_8_a_window_that_covers_everything_is_dense(rng, model_of, tiny_config):
    dense, prompt = model_of(), a_prompt(rng)
    wide = random_model(dataclasses.replace(tiny_config(), sliding_window=400), cache_tokens=2048)
    for method in ("full_attention", "turborag"):
        np.testing.assert_allclose(
            online_logits(wide, method, prompt), online_logits(dense, method, prompt), **CLOSE
        )


@pytest.mark.parametrize(
    "sizes",
    [
        (2, 2, 2),
        pytest.param((1, 4, 2), marks=pytest.mark.slow),
        pytest.param((8, 1, 1), marks=pytest.mark.slow),
        pytest.param((1, 2, 4), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "method", ["turborag", pytest.param("full_attention", marks=pytest.mark.slow)]
)
def test_law_11_sharded_equals_one_device(rng, tiny_config, caplog, sizes, method):
    """A (data, fsdp, tensor) mesh changes nothing; sizes it does not divide are named."""
    config = tiny_config(vocab_size=104, model_dim=24, mlp_dim=40)
    one = random_model(config, cache_tokens=2048)
    many = random_model(config, mesh=make_mesh(*sizes), cache_tokens=2048)
    documents = [[int(t) for t in d] for d in ids(rng, 30, 17, 44)]
    questions = [list(map(int, q)) for q in ids(rng, 9, 3, 30, 12)]
    results = [
        generate(questions, documents=documents, model=m, method=method, max_new_tokens=5)
        for m in (one, many)
    ]
    assert [r.token_ids for r in results[0]] == [r.token_ids for r in results[1]]
    if sizes[2] == 4:  # 2 KV heads over 4 devices
        assert "kv_heads=2 is not divisible by mesh tensor=4 and is replicated" in caplog.text
    else:
        assert not engine_of(many).runner.cache.pool.k.sharding.is_fully_replicated or sizes[2] == 1


def test_a_mesh_of_too_many_devices_is_refused():
    with refused(ConfigError, "4096"):
        make_mesh(16, 16, 16)


def test_encoders_pack_without_mixing_chunks(rng, model_of):
    """Chunks that share a packed row get what each gets alone."""
    model = model_of("glm4")
    prefix, *chunks = ids(rng, 6, 30, 5, 61, 1, 18)
    for encoder in ("isolated", "after_prefix"):
        together = dict(encode_chunks(model, encoder, prefix, chunks))
        assert sorted(together) == list(range(5))
        for index, chunk in enumerate(chunks):
            ((_, alone),) = encode_chunks(model, encoder, prefix, [chunk])
            assert alone.shape == (3, 2, len(chunk), 2, 10) == together[index].shape
            np.testing.assert_allclose(together[index], alone, **CLOSE)


def test_keys_name_what_the_chunk_saw(rng, model_of):
    model = model_of()
    one, other, chunk = ids(rng, 5, 6, 20)
    assert chunk_key(model.fingerprint, model, "isolated", one, chunk) == chunk_key(
        model.fingerprint, model, "isolated", other, chunk
    )
    keys = {
        chunk_key(model.fingerprint, model, "after_prefix", p, chunk) for p in (one, other, one[:0])
    }
    assert len(keys | {chunk_key(model.fingerprint, model, "isolated", one, chunk)}) == 4


@pytest.fixture
def compilations(caplog):
    """Names of the functions that were compiled since the last call, on whatever thread."""

    def since():
        said = [re.match(r"Compiling (?:jit\()?(\w+)", text) for text in caplog.messages]
        caplog.clear()
        return {found[1] for found in said if found}

    jax.config.update("jax_log_compiles", True)  # that of all threads
    yield since
    jax.config.update("jax_log_compiles", False)


def test_a_new_length_does_not_recompile(rng, model_of, compilations):
    """Prompts, chunks and answers of other lengths run through what is compiled already."""
    model = model_of("llama", num_layers=2, mlp_dim=41)  # which nobody else has
    documents = [[int(t) for t in d] for d in ids(rng, 100, 90, 80)]

    def ask(question_length, documents, new_tokens):
        (question,) = ids(rng, question_length)
        for method in ("full_attention", "turborag", "turborag_composite"):
            generate(question, documents=documents, model=model, method=method,
                     max_new_tokens=new_tokens)  # fmt: skip

    compiled = (prefill._prefill_piece, answer._join, answer._steps, load._place)
    names = {function.__name__ for function in compiled}
    ask(30, documents, 9)
    assert compilations() >= names - {"_join", "_place"}  # some are the same for other models
    for question_length, lengths, new_tokens in ((25, (98, 91, 77), 12), (17, (90, 90, 90), 3)):
        ask(question_length, [list(map(int, d)) for d in ids(rng, *lengths)], new_tokens)
    assert not compilations() & names


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_prompt_in_pieces_equals_one_forward(rng, model_of, monkeypatch, family):
    """Prompts longer than one prefill run in pieces; in a batch, each row ends in its own piece."""
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", 64)
    model = model_of(family)
    prompts = [a_prompt(rng, final=n) for n in (9, 150, 60)]
    seen = served(model, METHODS["full_attention"], prompts)
    for (_, logits, shown), prompt in zip(seen, prompts, strict=True):
        expected = packed_logits(model, prompt, "reordered", full=True)
        np.testing.assert_allclose(logits, expected, **CLOSE)
        assert shown == prompt.num_tokens


def test_pieces_of_a_long_prompt_are_few_shapes():
    from jaxrag.base.shapes import pieces

    shapes = set()
    for length in range(1, 6000):
        parts = pieces(length, 2048)
        assert sum(n for n, _ in parts) == length
        assert all(n <= width for n, width in parts)
        padding = sum(width for _, width in parts) - length
        assert padding <= max(64, length // 8)
        shapes |= {width for _, width in parts}
    powers = {16, 32, 64, 128, 256, 512, 1024, 2048}
    assert shapes == powers | {48, 80, 192, 384} | {
        n + more for n in (512, 1024, 2048) for more in (64, 128)
    }
    assert pieces(562, 2048) == [(562, 576)]
    assert pieces(4146, 2048) == [(2048, 2048), (2098, 2112)]


def test_pool_evicts_unused_chunks_and_refuses_what_cannot_fit(rng, tiny_config):
    model = random_model(tiny_config(num_layers=2), cache_tokens=9 * PAGE)
    one, two, three, final = ids(rng, 3 * PAGE, 3 * PAGE, 3 * PAGE, 1)
    key = chunk_key(model.fingerprint, model, "isolated", final[:0], one)

    def look(*chunks):
        """Where the first chunk came from, free pages, and whether the first of all is there."""
        prompt = Prompt(final[:0], chunks, final)
        request = Request(prompt, engine_of(model).memory, METHODS["turborag"], 1)

        def seen(runner, state, there):
            allocator = runner.cache.allocator
            return state.parts[1].origin.how, allocator.num_free, key in allocator

        [found] = prefilled(engine_of(model), [request], seen)
        return found

    assert look(one, two) == ("encoded", 2, True)
    with refused(RequestError, "cache_tokens"):
        look(one, two, three)
    # The least recently used left, the store keeps it.
    assert look(three) == ("encoded", 2, False)
    assert look(one)[::2] == ("store", True)


def test_refused_combinations():
    with refused(RequestError):
        Method("odd", encoder="after_prefix", positions="composite")
    with refused(RequestError, "positions='sideways'"):
        Method("odd", encoder="isolated", positions="sideways")


def test_composite_with_a_window_is_refused(rng, model_of):
    model = model_of("mistral")
    with refused(RequestError):
        generate([5, 6], documents=[[7, 8]], model=model, method="turborag_composite")
    layout = lay_out(2, [3, 4], 2, "composite")
    whole = np.full((1, 11), 5)
    with refused(RequestError, "7"):
        model.logits(whole, layout.positions[None], layout.segments[None])


def test_bfloat16_agrees_with_float32(rng, tiny_config):
    """Law tolerance for bf16: the same first token and a small KL, through pool and store."""
    config = tiny_config(vocab_size=64)
    wide = random_model(config, cache_tokens=2048)
    narrow = random_model(dataclasses.replace(config, dtype="bfloat16"), cache_tokens=2048)
    narrow.params = jax.tree.map(lambda x: x.astype("bfloat16"), wide.params)
    agree, divergences = 0, []
    for _ in range(12):
        prefix, *chunks, final = (rng.integers(3, 64, n).astype(np.int32) for n in (5, 30, 20, 9))
        prompt = Prompt(prefix, tuple(chunks), final)
        logits = [online_logits(m, "turborag", prompt).astype(np.float64) for m in (wide, narrow)]
        log_p, log_q = (x - x.max() - np.log(np.exp(x - x.max()).sum()) for x in logits)
        divergences.append(float((np.exp(log_p) * (log_p - log_q)).sum()))
        agree += int(log_p.argmax() == log_q.argmax())
    assert agree >= 10 and np.mean(divergences) < 2e-3, (agree, divergences)
