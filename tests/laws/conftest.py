"""One model a family and its engine, what all laws ask of it, and forwards without a cache."""

import dataclasses
import functools
import itertools
import queue
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrix import ALL_METHODS, ALL_RULES, FAMILIES
from mixed import Mixed

from jaxrag.base.types import FINAL, Tokens
from jaxrag.engine import prefill, prefill_queue
from jaxrag.engine.engine import Engine
from jaxrag.engine.progress import Progress
from jaxrag.engine.request import Prompt, Request
from jaxrag.engine.state import EngineSettings
from jaxrag.kv.cache import PagePool
from jaxrag.kv.store import MemoryStore, derive
from jaxrag.models.decoder import forward, unembed
from jaxrag.models.model import random_model
from jaxrag.models.segments import lay_out
from jaxrag.reuse.encode import wrapped
from jaxrag.reuse.methods import Method
from jaxrag.reuse.select import KvDeviation, kv_deviation

CLOSE = {"rtol": 1e-4, "atol": 2e-5}
ROWS, TOKENS = 4, 6  # of the programs that decode, and of an answer
WIDTH = 64  # of forwards without a cache


@dataclasses.dataclass(frozen=True, eq=False)
class Answer:
    """What one request was given.

    Attributes:
      logits: [V] after its prompt.
      tokens: its answer.
      logprobs: of each token, a function of all logits of its step.
      chosen: chunk tokens that its selector chose; None where none ran.
      fresh: [L, C] whether K and V of a chunk token were computed for it.
      parts: of every chunk its key, and its pages in the pool; () where it was computed in place.
      store: that was asked for them.
      flops: to the first token.
      seen: what ``look`` made of it.
    """

    logits: np.ndarray
    tokens: tuple[int, ...]
    logprobs: np.ndarray
    chosen: list[int] | None
    fresh: np.ndarray
    parts: list[tuple[str, tuple[int, ...]]]
    store: MemoryStore
    flops: int
    seen: Any

    def same(self, other: "Answer") -> None:
        """Every bit is."""
        assert (self.tokens, self.chosen) == (other.tokens, other.chosen)
        np.testing.assert_array_equal(self.logits, other.logits)
        np.testing.assert_array_equal(self.logprobs, other.logprobs)

    def close(self, other: "Answer") -> None:
        """The tokens are, and all else is but for rounding."""
        assert (self.tokens, self.chosen) == (other.tokens, other.chosen)
        np.testing.assert_allclose(self.logits, other.logits, **CLOSE)
        np.testing.assert_allclose(self.logprobs, other.logprobs, **CLOSE)

    def follows(self, logits: np.ndarray) -> None:
        """It is greedy by the logits [n, V] of another forward over prompt and answer."""
        np.testing.assert_allclose(self.logits, logits[0], **CLOSE)
        assert self.tokens == tuple(logits.argmax(-1))
        np.testing.assert_allclose(self.logprobs, self.by(logits), **CLOSE)

    def by(self, logits: np.ndarray) -> np.ndarray:
        """Log-probabilities of its tokens by other logits [n, V]."""
        return np.asarray(jax.nn.log_softmax(logits))[np.arange(len(self.tokens)), self.tokens]


@functools.partial(jax.jit, static_argnames=("config", "apart"))
def _mixed(params, config, rope, tokens, stored, fresh, chunks, apart):
    attend = Mixed(config, rope, stored, fresh, chunks, apart)
    hidden, *_ = forward(params, config, tokens, None, attend)
    return unembed(params, config, hidden)


def made_of(method: str, rule: str = "dense") -> Method:
    """A method under a rule."""
    return dataclasses.replace(ALL_METHODS[method], decode=ALL_RULES[rule])


@dataclasses.dataclass(frozen=True)
class Client:
    """Passes on, with its place, what the engine says of a request and where its KV lies."""

    at: int
    look: Callable[..., None]
    hear: Callable[[tuple[int, Progress]], None]

    def __call__(self, progress):
        self.hear((self.at, progress))

    def on_prefill(self, *seen):
        self.look(self.at, *seen)


class Bench:
    """A family's model, its engine, and what is asked of it.

    Attributes:
      prompts: of three chunks; of two of them at other places; of one; and of that one alone.
      primer: that methods such as "primed" read chunks behind.
      packets: whether that is vectors, which the prompts' chunks hold.
    """

    def __init__(self, config, packets=False):
        self.model = random_model(config, cache_tokens=2048)
        # Who asks at once is in the pool at once, whatever has to be encoded.
        self.engine = self.model.engine = Engine(self.model, EngineSettings(lockstep=True))
        rng = np.random.default_rng(20)
        prefix, a, b, c, *finals = (
            rng.integers(3, 101, n).astype(np.int32) for n in (4, 30, 6, 3, 9, 12, 7, 11)
        )
        parts = ((prefix, (b, a, c)), (prefix, (c, a)), (prefix, (b,)), (prefix[:0], (b,)))
        self.prompts = [
            Prompt(start, chunks, final, tuple((a if it is b else b,) for it in chunks))
            for (start, chunks), final in zip(parts, finals, strict=True)
        ]
        self.primer = rng.integers(3, 101, 13).astype(np.int32)
        self.reader = self.model
        if packets:
            self.primer = rng.normal(size=(2, config.model_dim)).astype(np.float32)
            self.reader = self.model.with_soft(self.primer)
            around = functools.partial(wrapped, vocab_size=config.vocab_size, header=1, count=2)
            self.prompts = [  # of FEW keys, still, where they were
                dataclasses.replace(it, chunks=tuple(around(ids[1:]) for ids in it.chunks))
                for it in self.prompts
            ]
        self._salts = 0
        self._answers: dict[tuple[str, str], list[Answer]] = {}

    def new_store(self, *prompts: Prompt) -> MemoryStore:
        """A store whose chunks are nobody else's, in the pool neither; it has those of prompts."""
        self._salts += 1
        fingerprint = derive(self.model.fingerprint, salt=f"{self._salts}")
        store = MemoryStore(fingerprint, self.model.kv_layout, max_tokens=512)
        for prompt in prompts:
            self.serve(Method("put", "after_prefix"), [prompt], stores=[store], tokens=1)
        return store

    def answers(self, method: str, rule: str) -> list[Answer]:
        """To all prompts at once."""
        if (method, rule) not in self._answers:
            self._answers[method, rule] = self.serve(made_of(method, rule))
        return self._answers[method, rule]

    def serve(
        self,
        method: Method,
        prompts: Sequence[Prompt] = (),
        *,
        rows: int = ROWS,
        tokens: int = TOKENS,
        stores: Sequence[MemoryStore] | None = None,
        before: Callable[..., None] = lambda runner, state: None,
        after: Callable[..., None] = lambda runner, state: None,
        look: Callable[..., Any] = lambda runner, state: None,
    ) -> list[Answer]:
        """What the engine answers; where misses are computed in place, of a store with one chunk.

        Each request is shown to ``before`` and ``after`` when its tokens are selected, and to
        ``look`` once it is in the pool, as ``look(runner, state)``.
        """
        prompts = prompts or self.prompts
        if stores is None and method.misses == "in_place":
            second = self.prompts[1]
            stores = [self.new_store(dataclasses.replace(second, chunks=second.chunks[:1]))]
        stores = itertools.cycle(stores or [self.engine.memory])
        found: list[dict[str, Any]] = [{} for _ in prompts]
        news: queue.SimpleQueue[tuple[int, Progress]] = queue.SimpleQueue()
        select, best = prefill_queue.select_tokens, kv_deviation.best
        checks: dict[int, list[np.ndarray]] = {}  # by request what each check of CacheBlend kept

        def selects(runner, state, ahead):
            checks[state.number] = kept = []

            def keeps(*scores):
                kept.append(best(*scores))
                return kept[-1]

            before(runner, state)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(kv_deviation, "best", keeps)
                select(runner, state, ahead)
            after(runner, state)

        def hook(at, runner, state, there):
            found[at] |= {
                "logits": np.asarray(there.logits)[0],
                "chosen": None if state.choice is None else state.choice.tokens.tolist(),
                "fresh": _fresh(self.model, state, checks[state.number]),
                "parts": [(it.key, it.resident.pages if it.key else ()) for it in state.parts[1:]],
                "store": state.request.store,
                "seen": look(runner, state),
            }

        asked = [
            (
                Request(prompt, store, method, tokens, rows=rows, primer=self.primer),
                Client(at, hook, news.put),
            )
            for at, (prompt, store) in enumerate(zip(prompts, stores, strict=False))
        ]
        ids, logprobs = ([[] for _ in prompts] for _ in "ab")

        def hear(at, progress):
            if progress.error is not None:
                raise progress.error
            ids[at] += progress.new
            logprobs[at] += progress.logprobs
            if progress.last:
                found[at]["flops"] = progress.outcome.flops
            return progress.last

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prefill_queue, "select_tokens", selects)
            for module in (prefill, prefill_queue):  # of every prompt several pieces, of one width
                patch.setattr(module, "PREFILL_TOKENS", 16)
            self.engine.add_all(asked)
            for _ in prompts:
                while not hear(*news.get()):
                    pass
        return [
            Answer(tokens=tuple(tokens), logprobs=np.array(chances), **it)
            for tokens, chances, it in zip(ids, logprobs, found, strict=True)
        ]

    def mixed(self, method: Method, answers: Sequence[Answer]) -> list[np.ndarray]:
        """Logits [n, V] of each answer's steps, with K and V of chunks as the store has them.

        But for those that were computed for the request.
        """
        config = self.model.config
        shape = (config.num_kv_layers, len(answers), WIDTH)
        ids, positions = np.zeros((2, *shape[1:]), np.int32)
        fresh, chunks = np.ones(shape, bool), np.zeros(shape[1:], bool)
        kv = np.zeros((*shape[:2], 2, WIDTH, config.num_kv_heads, config.head_dim), np.float32)
        for row, (prompt, answer) in enumerate(zip(self.prompts, answers, strict=True)):
            ids[row], positions[row], _ = self._whole(prompt, answer, method.positions)
            start, end = len(prompt.prefix), prompt.num_tokens - len(prompt.final)
            fresh[:, row, start:end], chunks[row, start:end] = answer.fresh, True
            for (key, _), chunk in zip(answer.parts, prompt.chunks, strict=True):
                if key:
                    kv[:, row, :, start : start + len(chunk)] = answer.store.get_many([key]).kv
                start += len(chunk)
        tokens = Tokens(ids, positions, np.full_like(ids, FINAL))
        rope = self.model.rope(WIDTH)
        stored = (kv, fresh, chunks, method.chunk_attention)
        logits = np.asarray(_mixed(self.model.params, config, rope, tokens, *stored))
        return _steps(logits, self.prompts, answers)

    def packed(
        self,
        answers: Sequence[Answer],
        positions: str | None = None,
        prompts: Sequence[Prompt] = (),
    ) -> list[np.ndarray]:
        """The same by one packed forward: every chunk for itself, or full attention (None)."""
        prompts = prompts or self.prompts
        ids, places, segments = np.zeros((3, len(self.prompts), WIDTH), np.int32)
        for row, it in enumerate(zip(prompts, answers, strict=True)):
            ids[row], places[row], segments[row] = self._whole(*it, positions or "reordered")
        if positions is None:
            places, segments = None, np.where(segments, FINAL, 0)
        logits = np.asarray(self.reader.logits(ids, places, segments))
        return _steps(logits, prompts, answers)

    @staticmethod
    def _whole(prompt: Prompt, answer: Answer, positions: str) -> list[np.ndarray]:
        """Ids, positions and segments of prompt and answer, [WIDTH] each."""
        ids = np.concatenate((prompt.ids, answer.tokens[:-1]))
        lengths = len(prompt.prefix), [len(it) for it in prompt.chunks], len(prompt.final)
        layout = lay_out(*lengths[:2], lengths[2] + len(answer.tokens) - 1, positions)
        parts = (ids, layout.positions, layout.segments)
        return [np.pad(it, (0, WIDTH - len(ids))).astype(np.int32) for it in parts]

    @staticmethod
    def pool_kv(runner, pages) -> list[np.ndarray]:
        """K and V in pages of the pool, [L, n, page, K, H] each."""
        layers = np.arange(runner.model.config.num_kv_layers) * runner.cache.allocator.num_pages
        rows = layers[:, None] + np.array(pages, int)
        return [np.asarray(x[rows]) for x in (runner.cache.pool.k, runner.cache.pool.v)]

    def poison(self) -> None:
        """Let everything leave the pool, and every slot of it hold a NaN."""
        self.engine.forget()

        def job(runner):
            runner.cache._pool = jax.tree.map(lambda x: x * jnp.nan, runner.cache.pool)
            assert isinstance(runner.cache.pool, PagePool)

        self.engine.call(job)


def _steps(
    logits: np.ndarray, prompts: Sequence[Prompt], answers: Sequence[Answer]
) -> list[np.ndarray]:
    """Of rows of prompts and answers the logits [n, V] before each token of the answer."""
    return [
        row[it.num_tokens - 1 :][: len(answer.tokens)]
        for row, it, answer in zip(logits, prompts, answers, strict=False)
    ]


def _fresh(model, state, kept) -> np.ndarray:
    """[L, C] whether K and V of a chunk token are not those that the store has."""
    method, parts = state.request.method, state.parts[1:]
    in_place = [it.resident is None for it in parts]
    fresh = np.repeat(in_place, [len(it.ids) for it in parts])
    fresh = np.tile(fresh, (model.config.num_kv_layers, 1))
    if state.choice is not None:
        fresh[:, state.choice.tokens] = True
        selector = method.selector
        if isinstance(selector, KvDeviation) and state.choice.copied:
            # Up to its first check layer all were computed, then what every check kept.
            fresh[: selector.layers[0] + 1] = True
            for first, last, tokens in zip(
                selector.layers, selector.layers[1:], kept, strict=False
            ):
                fresh[first + 1 : last + 1, tokens] = True
    return fresh


@pytest.fixture(scope="session")
def benches(tiny_config):
    """Made once, so that all laws share compiled programs and answers."""

    def make(name, packets=False, **more):
        family, changes = FAMILIES[name]
        changes = {"num_layers": 4, "eos_ids": (), **changes, **more}
        return Bench(tiny_config(family, **changes), packets)

    return functools.cache(make)


@pytest.fixture
def bench(benches, request):
    """``bench(family)``, of prompts as the test's method reads them."""
    asked = getattr(request.node, "callspec", None)
    named = None if asked is None else asked.params.get("method")
    return functools.partial(benches, packets=named in ALL_METHODS and ALL_METHODS[named].wraps)
