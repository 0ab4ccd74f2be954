"""What answers of a form cost: tokens a second beside free answers, and hostile forms.

A random Llama with a byte-level tokenizer draws answers at temperature 1. In every round rows of
free answers and rows of JSON, of a schema whose answers do not end before their room does, take
turns; so does a half of each together. Then each hostile form alone, in a process of its own:
seconds until it is compiled and 20 tokens were drawn of what it allows, and the memory it took.

example: python benchmarks/guided.py --out benchmarks/results/guided.json
"""

import dataclasses
import json
import multiprocessing
import random
import re
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from rounds import between, in_turn, ratios, spread
from script import Result, run_script
from tqdm import tqdm

from jaxrag.base.errors import EngineError, RequestError
from jaxrag.base.guide import Guide
from jaxrag.base.options import option
from jaxrag.base.types import HostArray
from jaxrag.engine.engine import engine_of
from jaxrag.engine.request import Prompt, Request
from jaxrag.engine.sampling_params import SamplingParams
from jaxrag.measure.machine import describe
from jaxrag.measure.zoo import llama
from jaxrag.models.model import Model, random_model
from jaxrag.models.spec import num_params
from jaxrag.models.text import byte_level
from jaxrag.models.text.guidance import Grammar
from jaxrag.models.text.tokenizer import Tokenizer
from jaxrag.reuse.methods import METHODS

_EOS = frozenset({0})
_RECORDS = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "place": {"enum": ["here", "there", "nowhere"]},
        },
        "required": ["name", "age", "place"],
        "additionalProperties": False,
    },
}
HOSTILE = {
    "objects in objects": Guide("json_schema", '{"properties": {"a": ' * 60 + "{}" + "}}" * 60),
    "deeper than is read": Guide("json_schema", '{"not": ' * 5000 + "{}" + "}" * 5000),
    "1,500 properties": Guide(
        "json_schema", json.dumps({"properties": {f"p{i}": {"type": "null"} for i in range(1500)}})
    ),
    "itself": Guide("json_schema", '{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'),
    "6,000 texts": Guide("choice", json.dumps([f"{i:06}" for i in range(6000)])),
    "a million characters": Guide("json_schema", '{"type": "string", "minLength": 1000000}'),
    "1,000 patterns": Guide(
        "json_schema",
        json.dumps({"properties": {f"p{i}": {"pattern": "^(a|b){1,50}c$"} for i in range(1000)}}),
    ),
    "repeats of repeats": Guide("regex", "((a{1,1000}){1,1000}){1,1000}b"),
    "ambiguous": Guide("regex", "(.*a){40}(.|a|[a-z])*" * 20),
    "alternatives": Guide("regex", "|".join(f"(.*{i}.*)" for i in range(3000))),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options:
    """How much."""

    documents: str = option("docs", "folder of .md files that the tokenizer is trained on", "DIR")
    vocabulary: int = option(32000, "of the tokenizer, at most", "N")
    layers: int = option(12, "of the model", "N")
    width: int = option(768, "of the model", "N")
    rows: int = option(8, "of the batch", "N")
    tokens: int = option(128, "of an answer", "N")
    repeats: int = option(5, "rounds", "N")


def run(options: Options) -> Result:
    """Both tables."""
    tokenizer = _tokenizer(options)
    model = _model(options, tokenizer)
    grammar = Grammar(
        tokenizer, Guide("json_schema", json.dumps(_RECORDS)), model.config.vocab_size, _EOS
    )
    arms = {
        "free": lambda: _rate(options, model, None, options.rows),
        "of a form": lambda: _rate(options, model, grammar, options.rows),
        "half of each": lambda: _rate(options, model, grammar, options.rows // 2),
    }
    rates = in_turn(arms, options.repeats, rounds=lambda it: tqdm(it, "rounds", file=sys.stderr))
    return {
        "options": dataclasses.asdict(options),
        "parameters": num_params(model.config),
        "vocabulary": model.config.vocab_size,
        "tokens_per_second": {name: spread(it) for name, it in rates.items()},
        "beside_free": {name: ratios(it, rates["free"]) for name, it in rates.items()},
        "hostile": {
            name: _apart(tokenizer, guide, model.config.vocab_size)
            for name, guide in tqdm(HOSTILE.items(), "hostile", file=sys.stderr)
        },
        "machine": describe(),
    }


def _tokenizer(options: Options) -> Tokenizer:
    texts = [it.read_text(encoding="utf-8") for it in sorted(Path(options.documents).glob("*.md"))]
    if not texts:
        raise RequestError(f"--documents {options.documents}: no .md file")
    made = byte_level.train(texts, options.vocabulary, ["<|end|>"])
    return Tokenizer(made.to_str().encode(), {"eos_token": "<|end|>"}, {})


def _model(options: Options, tokenizer: Tokenizer) -> Model:
    config = llama(
        vocab_size=tokenizer.vocab_size,
        num_layers=options.layers,
        model_dim=options.width,
        mlp_dim=3 * options.width,
        num_heads=options.width // 64,
        num_kv_heads=options.width // 64,
        head_dim=64,
        max_positions=2048,
        eos_ids=tuple(_EOS),
    )
    return random_model(config, 0, cache_tokens=16384, tokenizer=tokenizer)


def _rate(options: Options, model: Model, grammar: Grammar | None, guided: int) -> float:
    """Tokens a second behind the first of each, with so many rows in the form."""
    engine, draw = engine_of(model), np.random.default_rng(0)
    requests = []
    for row in range(options.rows):
        own = grammar if row < guided else None
        prompt = Prompt(
            np.zeros(0, np.int32),
            (),
            draw.integers(1, model.config.vocab_size, 64).astype(np.int32),
        )
        sampling = SamplingParams(1.0, seed=row, guide=None if own is None else own.guide)
        eos_ids = frozenset() if own is None else _EOS
        full, tokens = METHODS["full_attention"], options.tokens
        requests.append(
            Request(
                prompt,
                engine.memory,
                full,
                tokens,
                sampling,
                eos_ids,
                rows=options.rows,
                grammar=own,
            )
        )
    begun, counted = 0.0, 0
    for progress in engine.iterate(requests):
        if progress.error is not None:
            raise progress.error
        if not begun and len(progress.new):
            begun = time.perf_counter()
        elif begun:
            counted += len(progress.new)
    return counted / (time.perf_counter() - begun)


def _apart(tokenizer: Tokenizer, guide: Guide, vocab_size: int) -> Result:
    """Of one hostile form, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_walked, args=(writer, tokenizer.to_json(), guide, vocab_size))
    process.start()
    told: Result = reader.recv()
    process.join()
    return told


def _walked(writer: Connection, tokenizer_json: str, guide: Guide, vocab_size: int) -> None:
    """Compile, and draw 20 tokens of what is allowed."""
    tokenizer = Tokenizer(tokenizer_json.encode(), {"eos_token": "<|end|>"}, {})
    warm = Grammar(tokenizer, Guide("regex", "a"), vocab_size, _EOS)
    assert len(warm.first)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    before = _peak_kib()
    begun, draw, said = time.perf_counter(), random.Random(0), "answered"
    try:
        grammar = Grammar(tokenizer, guide, vocab_size, _EOS)
        matcher = grammar.matcher()
        allowed: HostArray | None = grammar.first
        for _ in range(20):
            if allowed is None:
                break
            bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")
            choices = [int(it) for it in np.flatnonzero(bits) if it not in _EOS]
            allowed = matcher.take(draw.choice(choices)) if choices else None
    except (RequestError, EngineError) as error:
        said = f"{type(error).__name__}: {str(error)[:100]}"
    spent = time.perf_counter() - begun
    more = _peak_kib() - before
    writer.send({"seconds": round(spent, 3), "mib": round(more / 1024, 1), "said": said})


def _peak_kib() -> int:
    """The most memory that this process had."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])  # type: ignore[index]


def report(result: Result) -> list[str]:
    """The tables."""
    lines = [f"{'rows':14} tokens a second    beside free"]
    for name, it in result["tokens_per_second"].items():
        lines.append(
            f"{name:14} {between(it, '.0f'):18} {between(result['beside_free'][name], '.2f')}"
        )
    lines.append(f"{'hostile form':22} seconds   MiB")
    for name, it in result["hostile"].items():
        lines.append(f"{name:22} {it['seconds']:7.3f} {it['mib']:5.1f}  {it['said']}")
    return lines


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, Options, run, report))
