"""Decode rules: which keys a generated token attends to, over the same paged pool for all."""

from collections.abc import Mapping
from typing import Any

from jaxrag.base.tables import build_named, table_from
from jaxrag.reuse.attention_index import name_of, spec_from
from jaxrag.reuse.decode.dense import Dense
from jaxrag.reuse.decode.flat import Flat
from jaxrag.reuse.decode.footprint import Account, Bytes, index_bytes
from jaxrag.reuse.decode.host_search import HostSearch
from jaxrag.reuse.decode.infllm import InfLLM
from jaxrag.reuse.decode.quest import Quest
from jaxrag.reuse.decode.retrieval import IvfRetrieval, Retrieval
from jaxrag.reuse.decode.rule import DecodeRule, Observe, PromptQueries, Prompts
from jaxrag.reuse.decode.snapkv import SnapKV
from jaxrag.reuse.decode.static_window import StaticWindow
from jaxrag.reuse.decode.step import DecodeAttend, Decoding, order_of
from jaxrag.reuse.decode.stored import Carried
from jaxrag.reuse.decode.topn import TopN
from jaxrag.reuse.decode.view import View

__all__ = [
    "DECODE_RULES",
    "Account",
    "Bytes",
    "Carried",
    "DecodeAttend",
    "DecodeRule",
    "Decoding",
    "Dense",
    "Flat",
    "HostSearch",
    "InfLLM",
    "IvfRetrieval",
    "Observe",
    "PromptQueries",
    "Prompts",
    "Quest",
    "Retrieval",
    "SnapKV",
    "StaticWindow",
    "TopN",
    "View",
    "index_bytes",
    "order_of",
    "rule_from",
]

DECODE_RULES: dict[str, type[DecodeRule]] = {
    "dense": Dense,
    "static_window": StaticWindow,  # StreamingLLM
    "snapkv": SnapKV,
    "infllm": InfLLM,
    "quest": Quest,
    "flat": Flat,
    "ivf": IvfRetrieval,
    "retrieval": Retrieval,  # RetrievalAttention
    "topn": TopN,  # KCache
}

_INDEXED = {"ivf": name_of(IvfRetrieval().index), "retrieval": name_of(Retrieval().index)}


def rule_from(value: str | Mapping[str, Any] | DecodeRule, where: str = "decode") -> DecodeRule:
    """A rule by name, from a table {name = ..., settings}, or the rule itself.

    As one text the settings follow the name: "topn:n=64,renormalise=true". Settings of the index
    follow a point: "retrieval:index=lists,index.exact_below=0"; without a kind they are of the
    rule's own.

    Raises ConfigError for an unknown name or setting, RequestError for a value out of range.
    """
    if isinstance(value, DecodeRule):
        return value
    settings = table_from(value, where, parts={"index": "kind"})
    index, own = settings.get("index"), _INDEXED.get(str(settings.get("name")))
    if isinstance(index, Mapping) and own is not None:
        index = {"kind": own, **index}
    if isinstance(index, str | Mapping):
        settings["index"] = spec_from(index, f"{where}.index")
    return build_named(DECODE_RULES, settings, where)
