"""What reuse saves under engine="llama_cpp": first tokens, tokens after it, and bytes.

Passages of NQ-open are given as documents, in another order every time. First tokens come by full
attention, from KV in memory, and from KV on disk, where it is read and verified. Decoding is
compared with plain llama.cpp in this process, and all of it with our own engine, on the same file.

example: python benchmarks/llama_cpp_reuse.py --model FILE.gguf --data nq-open-oracle.jsonl
"""

import ctypes
import dataclasses
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from script import Result, run_script

import jaxrag
from jaxrag.base.options import option, parse_counts
from jaxrag.engine.engine import engine_of
from jaxrag.measure.machine import describe, settle
from jaxrag.measure.subject import described
from jaxrag.models.llama_cpp import ROWS

_ROOM = 256  # tokens of template, question and answer


@dataclasses.dataclass(frozen=True)
class ReuseOptions:
    """What is measured."""

    model: str = option(dataclasses.MISSING, "a GGUF file", "MODEL")
    data: str = option(dataclasses.MISSING, "NQ-open's oracle file", "FILE")
    engines: str = option("llama_cpp,jax", "in turn", "NAME,...")
    contexts: tuple[int, ...] = option(
        (1024, 2048, 4096), "tokens of a prompt", "N,...", parse=parse_counts
    )
    method: str = option("full_reuse", "beside full attention", "NAME")
    tokens: int = option(32, "of an answer", "N")
    repeats: int = option(3, "orders of the passages", "N")


def run(options: ReuseOptions) -> Result:
    """Rows of engine and context, JSON-able."""
    texts, rows, subject = _texts(options.data), list[dict[str, Any]](), {}
    for engine in options.engines.split(","):
        model = jaxrag.load_model(options.model, engine=engine, cache_tokens=_cells(options))
        subject = described(Path(options.model).name, model, model.prompt_format())
        with tempfile.TemporaryDirectory() as folder:
            stored = {"chunk_tokens": 512, "stored": "native"}
            with jaxrag.KnowledgeBase.open(Path(folder) / "kb", model=model, **stored) as kb:
                for context in options.contexts:
                    rows.append(_measured(kb, engine, context, texts, options))
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        engine_of(model).forget()
        if model.backend is not None:
            model.backend.process.close()
            for row in rows:
                row["plain_ms"] = plain_decode(options.model, row["tokens"], options.tokens)
    return {"method": options.method, "model": subject, "rows": rows, **describe()}


def _cells(options: ReuseOptions) -> int:
    return max(options.contexts) + 2 * _ROOM


def _texts(path: str) -> list[str]:
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    found = (json.loads(line)["ctxs"][0] for line in lines)
    return [f"{it['title']}: {it['text']}" for it in found]


def _measured(
    kb: jaxrag.KnowledgeBase, engine: str, context: int, texts: list[str], options: ReuseOptions
) -> dict[str, Any]:
    """First tokens in seconds, medians over the orders, of which the first one warms up."""
    model = kb.model
    assert model is not None
    documents, count = list[str](), 0
    for text in texts:
        size = len(model.text_tokenizer().encode(text))
        if count + size > context - _ROOM // 2:
            break
        documents.append(text)
        count += size
    found: dict[str, list[float]] = {"full": [], "memory": [], "disk": [], "token": []}
    tokens = 0
    for repeat in range(options.repeats + 1):
        order = documents.copy()
        random.Random(repeat).shuffle(order)

        def ask(
            method: str, tokens: int, order: list[str] = order, repeat: int = repeat
        ) -> jaxrag.Result:
            settle()
            return jaxrag.generate(
                f"What do these say, in few words ({repeat})?", kb=kb, documents=order,
                method=method, max_new_tokens=tokens, batch_size=ROWS if engine != "jax" else 1,
            )  # fmt: skip

        full = ask("full_attention", 1)
        engine_of(model).forget()
        disk, memory = ask(options.method, 1), ask(options.method, options.tokens)
        tokens = sum(memory.counts[it] for it in ("reused", "encoded")) + len(memory.token_ids)
        if repeat:  # all chunks are stored, and programs compiled
            assert not disk.counts["encoded"] and not memory.counts["encoded"]
            for name, result in (("full", full), ("disk", disk), ("memory", memory)):
                found[name].append(result.timings["ttft"])
            found["token"].append(memory.timings["per_token"])
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {
        "engine": engine,
        "context": context,
        "passages": len(documents),
        "tokens": tokens,
        **{f"{name}_seconds": medians[name] for name in ("full", "disk", "memory")},
        "full_over_disk": medians["full"] / medians["disk"],
        "full_over_memory": medians["full"] / medians["memory"],
        "token_ms": 1e3 * medians["token"],
        "bytes_per_token": kb.store.layout.stored_nbytes(1),
    }


def plain_decode(path: str, prompt: int, tokens: int) -> float:
    """Milliseconds a token of llama.cpp alone, greedy, behind so many tokens; as it comes."""
    import llama_cpp as lib

    silent = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(silent, ctypes.c_void_p(0))
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    asked = lib.llama_context_default_params()
    asked.n_ctx, asked.n_batch = prompt + tokens + 64, prompt
    asked.n_threads = asked.n_threads_batch = len(os.sched_getaffinity(0))
    context = lib.llama_init_from_model(model, asked)
    size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    batch = lib.llama_batch_init(prompt, 0, 1)

    def step(ids: Any, place: int) -> int:
        batch.n_tokens = len(ids)
        for at, token in enumerate(ids):
            batch.token[at], batch.pos[at] = int(token), place + at
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
            batch.logits[at] = at == len(ids) - 1
        assert not lib.llama_decode(context, batch)
        logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, len(ids) - 1), (size,))
        return int(logits.argmax())

    token = step(np.arange(1000, 1000 + prompt) % (size - 1), 0)
    times = []
    for at in range(tokens):
        start = time.perf_counter()
        token = step([token], prompt + at)
        times.append(time.perf_counter() - start)
    lib.llama_free(context)
    lib.llama_model_free(model)
    return 1e3 * statistics.mean(times)


def report(result: Result) -> list[str]:
    """A line for each row."""
    line = (
        "{engine:18} {tokens:5} tokens  full {full_seconds:6.2f} s  from disk {disk_seconds:.3f} s"
    )
    line += " ({full_over_disk:.1f}x)  from memory {memory_seconds:.3f} s ({full_over_memory:.1f}x)"
    line += "  a token {token_ms:.1f} ms"
    return [
        line.format(**row) + (f", plain {row['plain_ms']:.1f}" if "plain_ms" in row else "")
        for row in result["rows"]
    ]


if __name__ == "__main__":
    sys.exit(run_script(__doc__, ReuseOptions, run, report))
