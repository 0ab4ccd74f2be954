"""An engine whose tokens llama.cpp runs, over a process that reckons with token ids."""

import threading

import numpy as np
import pytest
from refusal import refused

import jaxrag
from jaxrag.base.config import ModelConfig, RopeConfig
from jaxrag.base.errors import Cancelled, ContextExceeded, EngineError, ModelError, RequestError
from jaxrag.engine.engine import Engine, engine_of
from jaxrag.engine.prompt_inspection import inspect_prompts
from jaxrag.engine.request import Prompt, Request
from jaxrag.engine.rows import _draw, _likeliest
from jaxrag.engine.sampling_params import SamplingParams
from jaxrag.engine.steps import SamplingRows
from jaxrag.kv.store import MemoryStore
from jaxrag.kv.store.layout import KVLayout
from jaxrag.models.backend import ROWS
from jaxrag.models.llama_cpp import Elsewhere, LlamaCppBackend
from jaxrag.models.model import Model
from jaxrag.reuse.methods import METHODS

V, BOS, EOS = 97, 1, 0
CONFIG = ModelConfig(
    family="llama", vocab_size=V, num_layers=1, model_dim=4, mlp_dim=4, num_heads=1, num_kv_heads=1,
    head_dim=2, norm_eps=1e-6, rope=RopeConfig(1e4, 2, interleaved=False, scaling=None),
    max_positions=400, sliding_window=None, window_layers=None, qkv_bias=False, o_bias=False,
    mlp_bias=False, qk_norm=False, post_norms=False, tie_embeddings=True, dtype="float16",
    bos_id=BOS, eos_ids=(EOS,),
)  # fmt: skip


def reckoned(ids):
    """The token behind others: of all of them, and of where each stands."""
    places = np.arange(1, len(ids) + 1)
    return 2 + int((np.asarray(ids, np.int64) * places * places).sum()) % (V - 2)


def answer(ids, count):
    ids = list(ids)
    for _ in range(count):
        ids.append(reckoned(ids))
    return ids[-count:]


class Process:
    """llama.cpp as the engine knows it. KV of a token is its id and the place it was read at."""

    def __init__(self):
        self.lives, self.runs, self.breaks, self.starts = 1, True, False, True
        self.rows, self.read = {}, []
        self.batches = []

    def live(self):
        if not self.starts:
            raise ModelError("no such file")
        if not self.runs:
            self.lives, self.runs, self.rows = self.lives + 1, True, {}
        return self.lives

    def die(self):
        self.runs = False
        raise EngineError("llama.cpp ended with SIGABRT in 'step'; it is started anew, ask again")

    def encode(self, before, ids):
        self.live()
        self.read.append((before.tolist(), ids.tolist()))
        kv = np.zeros((1, 2, len(ids), 2), np.float16)
        kv[0, 0, :, 0] = ids
        kv[0, 0, :, 1] = len(before) + np.arange(len(ids))
        return kv.view(np.uint8)

    def restore(self, row, kv, first, place, life):
        assert life == self.lives and self.runs
        ids, read = kv.view(np.float16)[0, 0].T.astype(int)
        assert (read - first == np.arange(len(ids))).all(), "moved from where it was not read"
        assert len(self.rows.setdefault(row, [])) == place, "a row has no gaps"
        self.rows[row] += ids.tolist()

    def step(self, runs, life):
        assert life == self.lives and self.runs
        if self.breaks:
            self.breaks = False
            self.die()
        self.batches.append(len(runs))
        logits = np.full((sum(ends for *_, ends in runs), V), -9.0, np.float32)
        wanted = iter(logits)
        for row, place, ids, ends in runs:
            held = self.rows.setdefault(row, [])
            assert len(held) == place
            held += ids.tolist()
            if ends:
                next(wanted)[reckoned(held)] = 9.0
        return logits

    def leave(self, row):
        self.rows.pop(row, None)


@pytest.fixture
def process():
    return Process()


@pytest.fixture
def model(process):
    layout, leading = KVLayout(1, 1, 2, "float16"), np.array([BOS], np.int32)
    backend = LlamaCppBackend("llama_cpp", process, layout, leading, 400, "0.0")
    return Model(CONFIG, Elsewhere(), None, "ab" * 32, cache_tokens=400, backend=backend)


@pytest.fixture
def store(model):
    return MemoryStore(model.fingerprint, model.kv_layout, max_tokens=400)


def ids(*values):
    return np.array(values, np.int32)


PREFIX, FIRST, SECOND = ids(BOS, 5, 6), ids(11, 12, 13, 14), ids(21, 22)


def asked(store, method="full_reuse", chunks=(FIRST, SECOND), final=(31, 32), tokens=5, **more):
    prompt = Prompt(PREFIX, chunks, ids(*final))
    return Request(prompt, store, METHODS[method], tokens, eos_ids=frozenset({EOS}), **more)


def told(model, *requests):
    """What came of requests: tokens, outcomes and errors."""
    found = [([], [], []) for _ in requests]
    for progress in engine_of(model).iterate(requests):
        tokens, outcomes, errors = found[progress.number]
        tokens += progress.new
        outcomes += [progress.outcome] * (progress.outcome is not None)
        errors += [progress.error] * (progress.error is not None)
    return found


@pytest.mark.parametrize("method", ["full_attention", "turborag", "full_reuse", "primed"])
@pytest.mark.parametrize("chunks", [(FIRST, SECOND), (SECOND, FIRST), (FIRST, FIRST), ()])
def test_a_prompt_is_what_it_is_in_any_order(model, process, store, method, chunks):
    primer = {"primer": ids(7, 8)} if method == "primed" else {}
    request = asked(store, method, chunks, **primer)
    for cold in (True, False):  # law 16
        process.read.clear()
        [(tokens, [outcome], [])] = told(model, request)
        assert tokens == answer(request.prompt.ids, 5)
        distinct = {it.tobytes() for it in chunks}
        assert len(process.read) == (cold and method != "full_attention") * (1 + len(distinct))
        rows = [(row.part, row.how) for row in outcome.reuse]
        if method == "full_attention":
            assert {how for _, how in rows} == {"computed"}
        elif not cold:
            assert rows[0] == ("prefix", "prefix hit")
            assert {how for _, how in rows[1:]} <= {"chunk hit", "prefix hit"}
            assert outcome.computed == 2
    before = {"turborag": [BOS], "full_reuse": [BOS, 5, 6], "primed": [BOS, 5, 6, 7, 8]}
    told(model, asked(store, method, (ids(41, 42),), **primer))
    if method in before:  # what a chunk is read behind
        assert (before[method], [41, 42]) in process.read


def test_chunks_that_are_missed_may_be_computed_in_place(model, process, store):
    told(model, asked(store, chunks=(FIRST,)))
    process.read.clear()
    method = jaxrag.Method("in_place", encoder="after_prefix", misses="in_place")
    prompt = Prompt(PREFIX, (SECOND, FIRST), ids(31))
    [(tokens, [outcome], [])] = told(model, Request(prompt, store, method, 3))
    assert tokens == answer(prompt.ids, 3) and not process.read
    assert [row.how for row in outcome.reuse] == ["prefix hit", "in place", "chunk hit"]


def test_many_at_once_are_each_their_own(model, process, store):
    several = [asked(store, final=(31, at), tokens=3 + at % 5) for at in range(3 * ROWS)]
    for request, (tokens, outcomes, errors) in zip(several, told(model, *several), strict=True):
        assert not errors and len(outcomes) == 1
        assert tokens == answer(request.prompt.ids, request.max_new_tokens)
    assert max(process.batches) == ROWS  # decoded together
    assert not process.rows
    assert not any(engine_of(model).status().requests.values())


def test_long_prompts_leave_others_their_turn(model, process, store):
    settings = jaxrag.engine.state.EngineSettings(prefill_tokens=16)
    model.engine = Engine(model, settings)
    long = Prompt(PREFIX, (), np.arange(200, dtype=np.int32) % V)
    requests = [Request(long, store, METHODS["full_attention"], 4), asked(store, tokens=20)]
    for request, (tokens, _, errors) in zip(requests, told(model, *requests), strict=True):
        assert not errors and tokens == answer(request.prompt.ids, request.max_new_tokens)
    assert 2 in process.batches


def test_a_process_that_dies_is_one_error_for_its_rows(model, process, store):
    told(model, asked(store))
    process.breaks = True
    several = [asked(store, final=(31, at)) for at in range(2 * ROWS)]
    found = told(model, *several)
    lost = [errors for _, _, errors in found if errors]
    assert 0 < len(lost) <= ROWS
    assert all("llama.cpp ended with SIGABRT" in str(error) for [error] in lost)
    for request, (tokens, _, errors) in zip(several, found, strict=True):
        assert errors or tokens == answer(request.prompt.ids, 5)
    assert engine_of(model).status().restarts == 1
    assert told(model, asked(store))[0][0] == answer(asked(store).prompt.ids, 5)


def test_rows_of_another_process_are_never_gone_on_with(model, process, store):
    """Somebody else's call found the process dead, and started another."""
    seen, died = [], threading.Event()

    def sink(progress):
        seen.append(progress)
        if len(progress.new) and not died.is_set():
            process.runs = False
            process.live()
            died.set()
        return None

    engine_of(model).add(asked(store, tokens=50), sink)
    while not (seen and seen[-1].last):
        pass
    assert isinstance(seen[-1].error, EngineError)
    assert "started anew" in str(seen[-1].error)


def test_a_file_that_cannot_be_loaded_is_an_error_of_the_request(model, process, store):
    process.starts = False
    [(_, _, [error])] = told(model, asked(store))
    assert isinstance(error, ModelError)
    process.starts = True
    assert told(model, asked(store))[0][0] == answer(asked(store).prompt.ids, 5)


def test_a_chunk_that_cannot_be_read_fails_its_request_alone(model, store, monkeypatch):
    monkeypatch.setattr("jaxrag.models.llama_cpp.MOST_READ", 8)
    long = asked(store, chunks=(np.arange(30, dtype=np.int32),))
    (_, _, [error]), (tokens, _, errors) = told(model, long, asked(store, tokens=9))
    assert isinstance(error, RequestError) and "a chunk of 30 tokens" in str(error)
    assert not errors and tokens == answer(asked(store).prompt.ids, 9)
    assert engine_of(model).status().restarts == 0


def test_what_is_aborted_leaves_its_row(model, process, store):
    stop, seen = threading.Event(), []

    def sink(progress):
        seen.append(progress)
        stop.set()

    engine = engine_of(model)
    number = engine.add(asked(store, tokens=300), sink)
    assert stop.wait(60)
    engine.abort(number)
    told(model, asked(store))
    assert isinstance(seen[-1].error, Cancelled) and not process.rows
    engine.stop(engine.add(asked(store, tokens=300), lambda progress: bool(progress.new)))
    told(model, asked(store))
    assert not process.rows


def test_tokens_are_drawn_as_anywhere(model, store):
    first = answer(asked(store).prompt.ids, 1)[0]
    sampling = SamplingParams(top_logprobs=2, logit_bias=((first, -100.0), (50, 60.0)))
    [progress, *_] = engine_of(model).iterate([asked(store, tokens=1, sampling=sampling)])
    assert progress.new == [50]
    assert progress.top[0][0][0] == first  # of the model's own logits
    hot = SamplingParams(temperature=50.0, seed=3)
    drawn = [told(model, asked(store, tokens=8, sampling=hot))[0][0] for _ in range(2)]
    assert drawn[0] == drawn[1] != answer(asked(store).prompt.ids, 8)


def test_the_likeliest_token_is_drawn_as_by_all_rules():
    logits = np.random.default_rng(3).normal(size=(4, V)).astype(np.float32) * 8
    logits[1, [7, 70]] = 60  # of equals the first
    logits[2, 5] = np.nan
    greedy, index = SamplingRows.of([SamplingParams()]), np.zeros(1, np.int32)
    for row in logits:
        drawn, (expected, _) = _likeliest(row), _draw(row[None], greedy, index)
        assert drawn.ids == expected.ids and drawn.ids.dtype == np.int32
        np.testing.assert_allclose(drawn.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)


def test_what_it_does_not_do_is_refused(model, store):
    for method in ("cacheblend", "fusionrag", "turborag_composite", "ape", "epic"):
        with refused(RequestError, "llama_cpp"):
            engine_of(model).add(asked(store, method), print)
        with refused(RequestError, "choose one of full_attention, full_reuse, turborag"):
            jaxrag.generate([1, 2], documents=[[3, 4]], model=model, method=method)
    with refused(RequestError, "cite"):
        jaxrag.generate([1, 2], documents=[[3]], model=model, method="turborag", cite="spans")
    with refused(RequestError, "prefix_cache"):
        jaxrag.generate([1, 2], documents=[[3]], model=model, method="turborag", prefix_cache=True)
    with refused(RequestError, "read and decoded by llama.cpp"):
        model.logits([[1, 2]])
    with refused(ContextExceeded, "cache_tokens"):
        engine_of(model).add(asked(store, tokens=390), print)


def test_what_looks_into_a_pool_is_refused(model, store):
    with refused(RequestError, "looks at KV on the device"):
        inspect_prompts(engine_of(model), [asked(store)], lambda *seen: None)
    with refused(RequestError, "looks at KV on the device"):
        engine_of(model).call(lambda runner: runner.cache.pool)
    assert told(model, asked(store))[0][0] == answer(asked(store).prompt.ids, 5)


def test_kv_of_one_engine_is_no_hit_of_another(model):
    others = [
        LlamaCppBackend(name, model.backend.process, model.backend.layout, PREFIX, 400, version)
        for name, version in (("llama_cpp:q8_0", "0.0"), ("llama_cpp", "0.1"))
    ]
    prints = {
        Model(CONFIG, Elsewhere(), None, "ab" * 32, backend=it).fingerprint
        for it in (model.backend, *others)
    }
    assert len(prints) == 3


def test_loading_refuses_what_it_is_not(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"no model")
    with refused(RequestError, "expected one of jax, jax:bfloat16, jax:int8, llama_cpp"):
        jaxrag.load_model(tmp_path / "model.gguf", engine="vllm")
    with refused(RequestError, "no mesh, dtype and host memory"):
        jaxrag.load_model(tmp_path / "model.gguf", engine="llama_cpp", dtype="float32")
    with refused(ModelError, "llama_cpp"):  # no GGUF file, or no llama-cpp-python
        jaxrag.load_model(tmp_path, engine="llama_cpp")
