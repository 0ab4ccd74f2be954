"""A plan as JSON and as tables."""

import dataclasses
from typing import Any

from jaxrag.base.config import ModelConfig
from jaxrag.measure.plan.formulas import (
    chunk_bytes,
    compute_seconds,
    decode_rows,
    encode_flops,
    kv_token_bytes,
    load_seconds,
    map_bytes,
    plan_method,
    pool_tokens,
    prompt_tokens,
    weight_bytes,
)
from jaxrag.measure.plan.settings import PlanSettings
from jaxrag.measure.table import Table
from jaxrag.models.spec import num_params
from jaxrag.reuse.methods import METHODS

_BYTES = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def plan_record(settings: PlanSettings, config: ModelConfig) -> dict[str, Any]:
    """All sums as plain values: seconds, bytes; null for what there is not."""
    chunk = {} if config.recurrent is None else {"chunk": _chunk(settings, config)}
    return {
        "settings": dataclasses.asdict(settings),
        "model": {
            "parameters": num_params(config),
            "weight_bytes": weight_bytes(config),
            "stored_bytes_per_token": kv_token_bytes(config, settings.stored),
        },
        **chunk,
        "prompt_tokens": prompt_tokens(settings),
        "pool_tokens": pool_tokens(settings, config),
        "decode_rows": min(decode_rows(METHODS[it], settings, config) for it in settings.methods),
        "methods": [
            dataclasses.asdict(plan_method(name, settings, config)) for name in settings.methods
        ],
    }


def _chunk(settings: PlanSettings, config: ModelConfig) -> dict[str, Any]:
    """Of one chunk with maps its bytes, and seconds to read it and to compute it instead."""
    whole, maps = chunk_bytes(settings, config), map_bytes(settings, config)
    return {
        "map_bytes": maps,
        "kv_bytes": whole - maps,
        "read_seconds": {tier.name: load_seconds(whole, tier) for tier in settings.tiers},
        "compute_seconds": compute_seconds(encode_flops(settings, config), settings),
    }


def plan_tables(record: dict[str, Any]) -> list[Table]:
    """What is stored, the time to the first token by tier, and what serving costs."""
    methods = record["methods"]
    chunk = [_one(record)] if "chunk" in record else []
    return [_stored(record), *chunk, _times(methods), _found(methods), _serving(methods)]


def _one(record: dict[str, Any]) -> Table:
    chunk = record["chunk"]
    names = [f"from {name}" for name in chunk["read_seconds"]]
    cells = [_seconds(it) for it in (*chunk["read_seconds"].values(), chunk["compute_seconds"])]
    form, both = record["settings"]["maps"], (chunk["map_bytes"], chunk["kv_bytes"])
    rows = [["maps", "bytes of maps", "of KV", *names, "computed"]]
    rows.append([form, *map(_sized, both), *cells])
    return Table("one chunk with maps of recurrent layers, read or computed", rows)


def _stored(record: dict[str, Any]) -> Table:
    corpus, model = record["settings"]["corpus"], record["model"]
    rows = [["method", "stored", "after a year"]]
    for row in record["methods"]:
        if not row["corpus_bytes"]:
            continue
        rows.append([row["method"], _sized(row["corpus_bytes"]), _sized(row["grown_bytes"])])
    title = (
        f"stored KV of {corpus['chunks']:,} chunks of {corpus['chunk_tokens']} tokens, "
        f"{_sized(model['stored_bytes_per_token'])} a token ({record['settings']['stored']})"
    )
    if "chunk" in record:
        title += f" and {_sized(record['chunk']['map_bytes'])} of maps a chunk"
    return Table(title, rows)


def _times(methods: list[dict[str, Any]]) -> Table:
    names = list(dict.fromkeys(
        tier["name"] for method in methods for tier in method["tiers"] if tier["name"] != _FULL
    ))  # fmt: skip
    rows = [["method", *names, "expected"]]
    for one in methods:
        by_name = {tier["name"]: tier["first_token"] for tier in one["tiers"]}
        cells = [_seconds(by_name[name]) if name in by_name else "" for name in names]
        rows.append([one["method"], *cells, _seconds(one["first_token"])])
    return Table("time to first token, by where a question's chunks are found", rows)


def _found(methods: list[dict[str, Any]]) -> Table:
    first = next((method for method in methods if method["corpus_bytes"]), None)
    rows = [["found in", "chunks held", "of all finds"]]
    for tier in [] if first is None else first["tiers"]:
        if tier["name"] != "computed":
            rows.append([tier["name"], f"{tier['chunks']:,.0f}", f"{100 * tier['share']:.1f} %"])
    title = "where chunks are found" + ("" if first is None else f" by {first['method']}")
    return Table(title, rows)


def _serving(methods: list[dict[str, Any]]) -> Table:
    rows = [["method", "TFLOP", "a token", "engines"]]
    for method in methods:
        none = method["engines"] is None
        rows.append([
            method["method"],
            f"{method['flops'] / 1e12:.3g}",
            _seconds(method["token"]),
            "no prompt fits" if none else f"{method['engines']:,}",
        ])  # fmt: skip
    title = "work to the first token, time of a further one, engines for the busiest hour"
    return Table(title, rows)


_FULL = "full attention"


def _sized(number: float) -> str:
    """1.2e9 -> 1.2 GB, of decimal bytes as disks are sold."""
    for size, unit in _BYTES:
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g} B"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"
