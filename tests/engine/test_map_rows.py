"""Models with recurrent layers, served by rows of their own: what they answer, and what not."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from refusal import refused

import jaxrag
from jaxrag.base.errors import ConfigError, EngineError, RequestError, StoreError
from jaxrag.base.sharding import make_mesh
from jaxrag.base.types import FINAL, FIRST_CHUNK, PREFIX
from jaxrag.engine.engine import engine_of
from jaxrag.engine.request import Prompt, Request
from jaxrag.kv.placement import KVPlacement
from jaxrag.kv.store import ChunkStore, MemoryStore
from jaxrag.models.delta_rule import StateMap
from jaxrag.models.map_rows import open_map_rows
from jaxrag.models.maps import MAP_FORMS, map_layout, maps_behind, stored_maps, with_maps
from jaxrag.models.model import load_model, random_model
from jaxrag.reuse.methods import METHODS

GOLDEN = Path(__file__).parents[1] / "goldens" / "qwen3_5"


@pytest.fixture(scope="module")
def model():
    return load_model(GOLDEN)


@pytest.fixture
def store(model):
    return MemoryStore(model.fingerprint, model.kv_layout, max_tokens=256)


def drawn(seed, *lengths):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 53, it).astype(np.int32) for it in lengths]


PREFIX_IDS, *CHUNKS = drawn(1, 5, 9, 16, 1, 2)
PRIMER = drawn(2, 4)[0]


def asked(store, method="full_reuse", chunks=CHUNKS, final=3, tokens=4, **more):
    prompt = Prompt(PREFIX_IDS, tuple(chunks), drawn(final, 4)[0])
    return Request(prompt, store, METHODS[method], tokens, **more)


def told(model, *requests):
    """Tokens and outcome of every request."""
    found = [([], []) for _ in requests]
    for progress in engine_of(model).iterate(requests):
        if progress.error is not None:
            raise progress.error
        found[progress.number][0].extend(progress.new)
        found[progress.number][1].extend([progress.outcome] * (progress.outcome is not None))
    return found


def packed(model, request, tokens, whole=()):
    """The packed forward's choices behind a prompt, given an answer: the same rule, other code.

    Chunks of ``whole`` see all that precedes them, and the last of the prompt is among them.
    """
    prompt = request.prompt
    parts = [prompt.prefix, *prompt.chunks, prompt.final, np.array(tokens[:-1], np.int32)]
    chunks = [FINAL if it in whole else FIRST_CHUNK + it for it in range(len(prompt.chunks))]
    numbers = [PREFIX, *chunks, FINAL, FINAL]
    segments = np.concatenate([np.full(len(it), n) for it, n in zip(parts, numbers, strict=True)])
    if request.method.encoder is None:
        segments[:] = FINAL
    ids, places = np.zeros(64, np.int32), np.zeros(64, np.int32)  # one program
    ids[: len(segments)], places[: len(segments)] = np.concatenate(parts), segments
    visible = request.method.name != "turborag"
    logits = model.logits(ids[None], segments=places[None], prefix_visible=visible)[0]
    return np.asarray(logits)[prompt.num_tokens - 1 : len(segments)].argmax(-1).tolist()


@pytest.mark.parametrize("method", ["full_attention", "turborag", "full_reuse"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 1)])
def test_answers_are_those_of_the_packed_forward(model, store, method, order):
    request = asked(store, method, [CHUNKS[it] for it in order])
    [(cold, [first])], [(warm, [again])] = told(model, request), told(model, request)  # law 16
    assert cold == warm == packed(model, request, cold)
    how = [row.how for row in again.reuse]
    if method == "full_attention":
        assert set(how) == {"computed"}
    else:
        assert [row.how for row in first.reuse] == ["encoded"] * 5
        assert how[:1] == ["prefix hit"] and set(how[1:]) <= {"chunk hit", "prefix hit"}
        assert again.computed == 4


def test_a_chunk_right_behind_its_prefix_is_exact(model):
    backend, (prefix, chunk, question) = model.backend, drawn(7, 5, 7, 4)
    life, [(_, front)] = backend.live(), backend.encode(prefix[:0], [prefix])

    def behind(before):
        [(_, stored)] = backend.encode(before, [chunk])
        backend.leave(0)
        backend.restore(0, front, 0, 0, life)
        backend.restore(0, stored, len(before), 5, life)
        return backend.step([(0, 12, question, True)], life)[0]

    exact, alone = behind(prefix), behind(prefix[:0])
    backend.leave(0)
    [whole] = backend.step([(0, 0, np.concatenate([prefix, chunk, question]), True)], life)
    backend.leave(0)
    close = 5e-5 * np.abs(whole).max()
    np.testing.assert_allclose(exact, whole, rtol=0, atol=close)
    assert np.abs(alone - whole).max() > 100 * close


def test_whole_chunks_may_be_computed_in_place(model, store):
    told(model, asked(store, chunks=CHUNKS[:2]))
    method = dataclasses.replace(METHODS["full_reuse"], misses="in_place")
    request = dataclasses.replace(asked(store, chunks=CHUNKS[:3]), method=method)
    [(tokens, [outcome])] = told(model, request)
    assert [row.how for row in outcome.reuse][1:] == ["prefix hit", "chunk hit", "in place"]
    assert tokens == packed(model, request, tokens, whole=(2,))


def test_a_primer_shapes_chunks_and_is_in_no_prompt(model, store):
    request = asked(store, "primed", primer=PRIMER)
    [(cold, [outcome])], [(warm, _)] = told(model, request), told(model, request)
    assert cold == warm
    assert sum(row.tokens for row in outcome.reuse) == sum(map(len, [PREFIX_IDS, *CHUNKS]))
    backend, both = model.backend, np.concatenate([PREFIX_IDS, PRIMER])
    [(_, behind)], [(_, plain)] = (backend.encode(it, CHUNKS[1:2]) for it in (both, PREFIX_IDS))
    assert behind.shape == plain.shape and np.abs(behind - plain).max() > 1e-3


def test_many_at_once_are_each_their_own(model, store):
    requests = [asked(store, final=at, tokens=2 + at % 4) for at in range(20)]
    alone = [told(model, it)[0][0] for it in requests]
    assert [tokens for tokens, _ in told(model, *requests)] == alone
    assert len({tuple(it) for it in alone}) > 5


def test_a_flipped_bit_of_a_map_is_encoded_again(model, tmp_path):
    store = ChunkStore.open(tmp_path, model.fingerprint, model.kv_layout, mode="rw")
    request = asked(store, chunks=CHUNKS[1:2])
    [(tokens, _)] = told(model, request)
    assert [row.how for row in told(model, request)[0][1][0].reuse] == ["prefix hit"] * 2
    [(_, chunk)] = model.backend.encode(PREFIX_IDS, CHUNKS[1:2])
    last = chunk[-1, 1, -2].tobytes()  # within the maps
    [path] = [it for it in tmp_path.rglob("*") if it.is_file() and last in it.read_bytes()]
    data = bytearray(path.read_bytes())
    data[data.index(last)] ^= 1
    path.write_bytes(data)
    engine_of(model).forget()  # and the arena
    [(found, [outcome])] = told(model, request)
    assert found == tokens
    assert [row.how for row in outcome.reuse] == ["prefix hit", "encoded"]


def test_a_chunk_is_a_fixed_number_of_bytes_and_those_of_its_tokens(model, store):
    told(model, asked(store))
    layout, r = model.kv_layout, model.config.recurrent
    maps = 4 * r.value_heads * r.key_dim * (r.key_dim + r.value_dim) + 4 * 3 * r.channels
    assert 0 <= layout.nbytes(0) - 4 * maps < layout.nbytes(1) - layout.nbytes(0)
    for record in store.records():
        assert record.nbytes == layout.nbytes(0) + record.tokens * 2 * 2 * 10 * 4


@pytest.mark.parametrize(
    ("engine", "most"), [("jax", 0), ("jax:bfloat16", 2**-8), ("jax:int8", 0.02)]
)
def test_maps_may_be_rounded(model, engine, most):
    form, config = MAP_FORMS[engine], model.config
    layout, r = map_layout(config, form), config.recurrent
    rng, of = np.random.default_rng(3), (4, r.value_heads, r.key_dim)
    a = 0.3 * np.eye(r.key_dim) + 0.02 * rng.standard_normal((*of, r.key_dim))
    maps = StateMap(*(np.float32(x) for x in (a, rng.standard_normal((*of, r.value_dim)))))
    tail = np.float32(rng.standard_normal((4, r.width - 1, r.channels)))
    kv = np.float32(rng.standard_normal((1, 2, 7, 2, 10)))
    chunk = with_maps(kv, stored_maps(maps, tail, form), layout)
    assert chunk.shape == layout.shape(7) and (chunk[:, :, :7] == kv).all()
    back = maps_behind(chunk, config, form, layout)
    assert (back.tail == tail).all()
    for found, given in zip(jax.tree.leaves(back.wide()), (maps.a, maps.b), strict=True):
        error = np.abs(np.asarray(found) - given).max() / np.abs(given).max()
        assert (error == 0) if not most else (0 < error < most)
    assert layout.rows <= map_layout(config, "float32").rows
    with refused(StoreError, "NaN or infinity"):
        stored_maps(StateMap(maps.a * np.nan, maps.b), tail, form)


def test_rounded_maps_are_chunks_of_another_kind(model, store):
    prints = {model.fingerprint}
    for form in ("bfloat16", "int8"):
        backend = open_map_rows(model.config, model.params, form, 512)
        other = dataclasses.replace(model, backend=backend, maps=form)
        prints.add(other.fingerprint)
        mine = MemoryStore(other.fingerprint, other.kv_layout, max_tokens=256)
        assert len(told(other, asked(mine, tokens=2))[0][0]) == 2
        assert other.backend.engine == f"jax:{form}"
    assert len(prints) == 3


def test_what_rows_do_not_do_is_refused(model, store, monkeypatch):
    for method in ("cacheblend", "fusionrag", "turborag_composite", "ape", "epic", "kcache"):
        with refused(RequestError, "a model with recurrent layers"):
            engine_of(model).add(asked(store, method), print)
        with refused(RequestError, "choose one of full_attention, full_reuse, turborag"):
            jaxrag.generate([1, 2], documents=[[3, 4]], model=model, method=method)
    with refused(RequestError, "decode rule 'quest': a model with recurrent layers attends to all"):
        jaxrag.generate(
            [1, 2], documents=[[3]], model=model, method="turborag", decode="quest:budget=48"
        )
    with refused(RequestError, "cite"):
        jaxrag.generate([1, 2], documents=[[3]], model=model, method="turborag", cite="spans")
    with refused(RequestError, "prefix_cache"):
        jaxrag.generate([1, 2], documents=[[3]], model=model, method="turborag", prefix_cache=True)
    with refused(RequestError, "reads no vectors"):
        model.with_soft(np.zeros((2, 24), np.float32))
    with refused(RequestError, "a chunk of 300 tokens"):
        list(model.backend.encode(PREFIX_IDS, [np.zeros(300, np.int32)]))
    with refused(RequestError, "expected one of jax, jax:bfloat16, jax:int8, llama_cpp"):
        load_model(GOLDEN, engine="bfloat16")
    with refused(RequestError, "engine='jax:int8'"):
        load_model(GOLDEN.parent / "qwen3", engine="jax:int8")
    with refused(ConfigError, "kv='host'"):
        model.placed(KVPlacement("host"))
    with monkeypatch.context() as patch:
        patch.setattr("jaxrag.models.map_rows.processes_of", lambda mesh: (0, 1))
        with refused(ConfigError, "a mesh over 2 processes"):
            dataclasses.replace(model, backend=None)


@pytest.mark.parametrize(
    ("family", "axes"),
    [("qwen3_next", (1, 1, 2)), ("qwen3_5", (1, 2, 2)), ("qwen3_5", (2, 1, 4))],
)
def test_a_mesh_answers_as_one_device(tiny_config, family, axes):
    """Law 13: states, KV and weights are split by heads; what a mesh does not divide is whole."""
    config = tiny_config(family, vocab_size=53, num_heads=4)
    heads = dataclasses.replace(config.recurrent, key_heads=4, value_heads=4)
    config = dataclasses.replace(config, recurrent=heads)
    plain, found = random_model(config, seed=3), []
    spread = random_model(config, seed=3, mesh=make_mesh(*axes))
    for model in (plain, spread):
        store = MemoryStore(model.fingerprint, model.kv_layout, max_tokens=256)
        [(tokens, _)] = told(model, asked(store, "full_reuse"))
        assert told(model, asked(store, "full_reuse"))[0][0] == tokens
        life, [(_, front)] = (
            model.backend.live(),
            model.backend.encode(PREFIX_IDS[:0], [PREFIX_IDS]),
        )
        model.backend.leave(0)
        model.backend.restore(0, front, 0, 0, life)
        [logits] = model.backend.step([(0, 5, PRIMER, True)], life)
        found.append((tokens, front, logits))
    (tokens, front, logits), (others, other_front, other_logits) = found
    assert tokens == others
    np.testing.assert_allclose(other_front, front, rtol=0, atol=1e-5 * np.abs(front).max())
    np.testing.assert_allclose(other_logits, logits, rtol=0, atol=1e-5 * np.abs(logits).max())
    held = spread.backend._held
    assert len(held[1].state.sharding.device_set) == spread.mesh.size
    assert held[1].state.addressable_shards[0].data.shape[2] == 4 // axes[2]


def test_rows_are_gone_with_the_device_that_failed(model, store, monkeypatch):
    def fails(*args):
        raise jax.errors.JaxRuntimeError("out of memory")

    life = model.backend.live()
    monkeypatch.setattr("jaxrag.models.map_rows._step", fails)
    with refused(EngineError, "out of memory"):
        told(model, asked(store))
    monkeypatch.undo()
    with refused(EngineError, "rows of this request are gone"):
        model.backend.step([(0, 0, PREFIX_IDS, True)], life)
    assert len(told(model, asked(store))[0][0]) == 4
