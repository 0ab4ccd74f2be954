"""Decode rules: which keys a generated token attends to, over the same paged pool for all."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrag.attention_index import spec_from
from jaxrag.config import strict_fields
from jaxrag.decode.dense import Dense
from jaxrag.decode.flat import Flat
from jaxrag.decode.footprint import Bytes, index_bytes
from jaxrag.decode.host_search import Account, HostSearch
from jaxrag.decode.infllm import InfLLM
from jaxrag.decode.quest import Quest
from jaxrag.decode.retrieval import Ivf, Retrieval
from jaxrag.decode.rule import DecodeRule, Observe, PromptQueries, Prompts
from jaxrag.decode.snapkv import SnapKV
from jaxrag.decode.static_window import StaticWindow
from jaxrag.decode.step import DecodeAttend, Decoding, order_of
from jaxrag.decode.stored import Carried
from jaxrag.decode.topn import TopN
from jaxrag.decode.view import View
from jaxrag.errors import ConfigError

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
    "Ivf",
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
    "ivf": Ivf,
    "retrieval": Retrieval,  # RetrievalAttention
    "topn": TopN,  # KCache
}


def rule_from(value: str | Mapping[str, Any] | DecodeRule, where: str = "decode") -> DecodeRule:
    """A rule by name, from a table {name = ..., settings}, or the rule itself.

    As one text the settings follow the name: "topn:n=64,renormalise=true". Settings of the index
    follow a point: "retrieval:index=lists,index.exact_below=0".

    Raises ConfigError for an unknown name or setting, RequestError for a value out of range.
    """
    if isinstance(value, DecodeRule):
        return value
    settings = _read(value, where) if isinstance(value, str) else dict(value)
    name = settings.pop("name", None)
    if name not in DECODE_RULES:
        raise ConfigError(f"{where}: name={name!r}: expected one of {', '.join(DECODE_RULES)}")
    if "index" in settings and not dataclasses.is_dataclass(settings["index"]):
        settings["index"] = spec_from(settings["index"])
    return DECODE_RULES[name](**strict_fields(DECODE_RULES[name], settings, where))


def _read(text: str, where: str) -> dict[str, Any]:
    """The table that a text such as "flat:k=50" stands for."""
    name, _, rest = text.partition(":")
    settings: dict[str, Any] = {"name": name}
    for part in filter(None, rest.split(",")):
        field, equals, value = part.partition("=")
        if not equals or not value:
            raise ConfigError(f"{where}: {part!r} of {text!r}: expected field=value, such as k=50")
        words = {"true": True, "false": False}
        number = value.removeprefix("-").isdigit()
        read = int(value) if number else words.get(value.lower(), value)
        if field == "index":
            field = "index.kind"
        if field.startswith("index."):
            settings.setdefault("index", {})[field.removeprefix("index.")] = read
        else:
            settings[field] = read
    return settings
