"""The axes of the laws: methods, decode rules and families; and which of their triples are tried.

By default every pair of values that go together is in a triple; ``make test-all`` tries them all.
"""

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import pytest

from jaxrag.base.config import (
    ExpertsConfig,
    InParts,
    LinearScaling,
    NoRotation,
    RopeConfig,
    YarnScaling,
)
from jaxrag.base.errors import RequestError
from jaxrag.reuse import methods
from jaxrag.reuse.attention_index import Ivf
from jaxrag.reuse.decode import (
    DecodeRule,
    Dense,
    Flat,
    InfLLM,
    IvfRetrieval,
    Quest,
    Retrieval,
    SnapKV,
    StaticWindow,
    TopN,
)
from jaxrag.reuse.methods import Method
from jaxrag.reuse.select import AllTokens, FirstK, KvDeviation, QueryGuided, RandomTokens

type Case = tuple[str, str, str]  # names of a method, a rule and a family

RATIO = 0.3
GRADUAL = KvDeviation(layers=(1, 3), widths=(1.6,), part="kv")


def _presets() -> Iterator[Method]:
    """Those that differ in what becomes of a prompt, without their rules."""
    seen = set()
    for method in methods.METHODS.values():
        alike = dataclasses.replace(method, name="", template="", decode=Dense())
        if alike not in seen:
            ratio = method.recompute_ratio and RATIO
            yield dataclasses.replace(method, decode=Dense(), recompute_ratio=ratio)
        seen.add(alike)


METHODS = {
    it.name: it
    for it in (
        *_presets(),
        Method("epic", "isolated", selector=FirstK(3)),
        Method("all", "isolated", selector=AllTokens()),
        Method("gradual", "isolated", selector=GRADUAL, recompute_ratio=RATIO),
        Method("over_cache", "after_prefix", selector=QueryGuided("cache"), recompute_ratio=RATIO),
        Method("neighbours", "neighbours"),
    )
}


def _settings() -> Iterator[Method]:
    """Other settings of selectors, an encoder for comparison, and chunks that are missing."""
    yield Method("neighbours_joint", "neighbours_joint")
    for name, encoder, selector in (
        ("random", "after_prefix", RandomTokens(3)),
        ("behind", "isolated", QueryGuided(place="behind")),
        ("dropped", "isolated", KvDeviation(keep_fresh=False)),
        ("gradual_dropped", "after_prefix", dataclasses.replace(GRADUAL, keep_fresh=False)),
    ):
        yield Method(name, encoder, selector=selector, recompute_ratio=RATIO)
    yield Method("weighed", "isolated", attention_temperature=0.6, scaling_factor=0.8)
    for name in ("full_reuse", "epic", "cacheblend", "gradual", "cache_craft", "over_cache"):
        changes = {"encoder": "after_prefix", "misses": "in_place"}
        yield dataclasses.replace(METHODS[name], name=f"{name}_in_place", **changes)


SETTINGS = {it.name: it for it in _settings()}  # by default under the dense rule, of one family
ALL_METHODS = METHODS | SETTINGS

# Under these settings a rule leaves nothing out of FEW keys, and something of twice as many.
FEW = 24
RULES: dict[str, DecodeRule] = {
    "dense": Dense(),
    "static_window": StaticWindow(sink=4, recent=20),
    "snapkv": SnapKV(capacity=20, window=4),
    "infllm": InfLLM(block=4, blocks=2, representatives=2, sink=4, recent=14, observed=4),
    "quest": Quest(budget=48, dense_layers=1),
    "flat": Flat(k=8, sink=4, recent=12),
    "ivf": IvfRetrieval(k=8, sink=4, recent=12, index=Ivf(clusters=4, probes=4, exact_below=0)),
    "retrieval": Retrieval(k=8, sink=4, recent=12),
    "topn": TopN(n=24),
}
# The same, in the slow tests.
RULE_SETTINGS: dict[str, DecodeRule] = {
    "static_window_cache": StaticWindow(sink=4, recent=20, positions="cache"),
    "infllm_cache": InfLLM(block=4, blocks=1, sink=4, recent=24, positions="cache"),
    "topn_all_layers": TopN(n=24, device_layers=0, renormalise=True),
}
ALL_RULES = RULES | RULE_SETTINGS

SCALES = {
    "embedding_scale": 1.7, "attention_scale": 0.2, "residual_scale": 0.6, "logit_scale": 1 / 3,
}  # fmt: skip
# YaRN over a part of the head, with an attention factor that no forward can overlook.
_YARN = RopeConfig(100.0, 6, False, YarnScaling(4.0, 32, 8.0, 0.5, 1.7, True))
_UNROTATED = RopeConfig(5_300.0, 10, False, NoRotation())
_TURNS = (False, True, False, True)
# A family of conftest.py and changes. The first two have between them the parts of all others: a
# decoder is what its config says, so that pairs of these and a rule are pairs of those parts.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "joined": (
        "glm4",
        {
            "qk_norm": True,
            "activation": "gelu_tanh",
            "sink_logits": True,
            "rope": dataclasses.replace(_YARN, interleaved=True),
            "more_ropes": (RopeConfig(100.0, 6, True, NoRotation()),),
            "rope_layers": (0, 1, 0, 1),
            **SCALES,
            "score_cap": 0.9,
            "logit_cap": 4.0,
        },
    ),
    "windows": (
        "gpt_oss",
        {
            "tie_embeddings": True,
            "sliding_window": 6,
            "window_layers": _TURNS,
            "head_dim": 12,
            "rope": RopeConfig(9_000.0, 12, False, LinearScaling(3.0)),
            "more_ropes": (RopeConfig(50.0, 12, False, InParts(2, 2)),),
            "rope_layers": (0, 1, 0, 1),
            "value_norm": True,
            "layer_scales": True,
            "unit_norms": True,
            "qk_norm": True,
            "joint_qk_norm": True,
            "post_norms": True,
            "pre_norms": False,
        },
    ),
    "unrotated": ("llama", {"more_ropes": (_UNROTATED,), "rope_layers": (0, 1, 1, 0)}),
    "yarn": ("llama", {"rope": _YARN}),
    "mixed": ("qwen2", {"sliding_window": 6, "window_layers": _TURNS}),
    "gemma4": (
        "gemma4",
        {
            "window_layers": _TURNS,
            "rope_layers": (0, 1, 0, 1),
            "own_kv_heads": (1, 2, 1, 2),
            "experts": ExpertsConfig(5, 2, True, beside=17),
        },
    ),
    "gemma4_shared": (
        "gemma4",
        {
            "num_layers": 6,
            "window_layers": (*_TURNS, False, True),
            "rope_layers": (0, 1) * 3,
            "own_kv_heads": (1, 2) * 3,
            "shared_layers": 2,
            "shared_mlp_dim": 56,
            "input_dim": 9,
        },
    ),
    "sinks": ("gpt_oss", {"sliding_window": None, "window_layers": None}),
    **{
        name: (name, {})
        for name in (
            *("llama", "mistral", "qwen2", "qwen3", "glm", "glm4", "granite", "gemma2"),
            *("gemma3", "olmo2", "olmo3", "smollm3", "mixtral", "qwen3_moe"),
        )
    },
}
USUAL = ("joined", "windows")
MORE: list[Case] = [("turborag", "dense", "gemma4_shared")]  # tried by default, beside these
WINDOWED = ("windows", "mixed", "mistral", "gemma2", "gemma3", "gemma4", "gemma4_shared", "olmo3")


def goes_together(method: str, rule: str, family: str) -> bool:
    """Does nothing refuse the three?"""
    try:
        made = dataclasses.replace(ALL_METHODS[method], decode=ALL_RULES[rule])
    except RequestError:
        return False
    return family not in WINDOWED or (rule == "dense" and made.positions == "reordered")


def _usual(method: str, rule: str, family: str) -> bool:
    some = (rule == "dense" and family == USUAL[0]) if method in SETTINGS else method in METHODS
    return family in USUAL and rule in RULES and some


def pairs(row: Case) -> set[frozenset[tuple[int, str]]]:
    """The pairs of values of a triple, each with its axis."""
    return {frozenset(pair) for pair in itertools.combinations(enumerate(row), 2)}


def covering(rows: Collection[Case]) -> list[Case]:
    """Few of the triples, in which every pair is that is in any: always the one with most new."""
    left = set().union(*map(pairs, rows))
    found = []
    while left:
        row = max(rows, key=lambda row: len(left & pairs(row)))  # the first of equals
        found.append(row)
        left -= pairs(row)
    return found


def triples(
    methods: Iterable[str] = tuple(ALL_METHODS), rules: Iterable[str] = tuple(ALL_RULES)
) -> tuple[list[Case], list[Case]]:
    """All triples of these that go together, and those of the default run."""
    rows = [row for row in itertools.product(methods, rules, FAMILIES) if goes_together(*row)]
    more = [row for row in MORE if row in rows]
    return rows, covering([row for row in rows if _usual(*row)]) + more


def cases(*axes: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrise by ``method``, ``rule`` and ``family``; what is not tried by default is slow."""
    rows, tried = triples(*axes)
    usual = set(tried)
    marked = [
        pytest.param(*row, id="-".join(row), marks=() if row in usual else pytest.mark.slow)
        for row in rows
    ]
    return pytest.mark.parametrize(("method", "rule", "family"), marked)
