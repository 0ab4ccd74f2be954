"""Selectors: which chunk tokens are computed again at question time, at equal rules for all.

What is forced is the same for every selector: the final block is always computed, a chunk that the
store does not hold is encoded before anything is selected, and a chunk whose KV is exact already
(the first one, encoded behind this very prefix) is left alone.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrag.base.tables import build_named, table_from
from jaxrag.kv.cache import PagedCache
from jaxrag.models.model import Model
from jaxrag.reuse.select.base import Selection, SelectionInput, Selector, budget_of
from jaxrag.reuse.select.cache_craft import CacheCraft
from jaxrag.reuse.select.extremes import AllTokens, NoTokens
from jaxrag.reuse.select.first_k import FirstK
from jaxrag.reuse.select.kv_deviation import KvDeviation
from jaxrag.reuse.select.query_guided import QueryGuided
from jaxrag.reuse.select.random_tokens import RandomTokens

__all__ = [
    "SELECTORS",
    "AllTokens",
    "CacheCraft",
    "FirstK",
    "KvDeviation",
    "NoTokens",
    "QueryGuided",
    "RandomTokens",
    "Selection",
    "SelectionInput",
    "Selector",
    "budget_of",
    "choose",
    "selector_from",
]

SELECTORS: dict[str, type[Selector]] = {
    "none": NoTokens,
    "all": AllTokens,
    "random": RandomTokens,
    "first_k": FirstK,  # EPIC
    "kv_deviation": KvDeviation,  # CacheBlend
    "cache_craft": CacheCraft,
    "query_guided": QueryGuided,  # FusionRAG
}


def selector_from(value: str | Mapping[str, Any] | Selector, where: str = "selector") -> Selector:
    """A selector by name, from a table {name = ..., settings}, or the selector itself.

    Raises ConfigError for an unknown name or setting, RequestError for a value out of range.
    """
    if isinstance(value, Selector):
        return value
    return build_named(SELECTORS, table_from(value, where), where)


def choose(model: Model, cache: PagedCache, selector: Selector, scene: SelectionInput) -> Selection:
    """Choose the tokens to recompute for a request, whose chunks lie in ``cache``.

    The selector is not run where there is nothing to decide: at ratio 0 or 1, or where the KV of
    every chunk is exact.
    """
    if scene.ratio == 0 or not scene.candidates.any():
        return Selection(np.zeros(0, np.int64))
    if scene.ratio == 1:
        return Selection(np.flatnonzero(scene.candidates))
    return selector.select(model, cache, scene)
