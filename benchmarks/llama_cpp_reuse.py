"""What reuse saves under engine="llama_cpp": first tokens, tokens after it, and bytes.

Passages of NQ-open are given as documents, in another order every time. First tokens come by full
attention, from KV in memory, and from KV on disk, where it is read and verified. Decoding is
compared with plain llama.cpp in this process, and all of it with our own engine, on the same file.

example: python benchmarks/llama_cpp_reuse.py --model FILE.gguf --data nq-open-oracle.jsonl
"""

import dataclasses
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from script import Result, run_script

from jaxrag.base.options import option, parse_counts
from jaxrag.engine.engine import engine_of
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.measure.machine import describe, settle
from jaxrag.measure.subject import described
from jaxrag.models.backend import ROWS
from jaxrag.models.llama_cpp import LlamaCppBackend
from jaxrag.models.model import load_model
from jaxrag.serve.answers import Result as Answer
from jaxrag.serve.generate import generate

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
    texts, rows, named = _texts(options.data), list[dict[str, Any]](), {}
    for engine in options.engines.split(","):
        model = load_model(options.model, engine=engine, cache_tokens=_cells(options))
        named = described(Path(options.model).name, model, model.prompt_format())
        with (
            tempfile.TemporaryDirectory() as folder,
            KnowledgeBase.open(
                Path(folder) / "kb", model=model, chunk_tokens=512, stored="native"
            ) as kb,
        ):
            for context in options.contexts:
                rows.append(_measured(kb, engine, context, texts, options))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        engine_of(model).forget()
        if isinstance(model.backend, LlamaCppBackend):
            model.backend.process.close()
            for row in rows:
                for name, flash in (("plain_ms", -1), ("plain_without_flash_ms", 0)):
                    row[name] = _plain(options.model, _tokens(row), options.tokens, flash)
    return dict(describe(), method=options.method, repeats=options.repeats, model=named, rows=rows)


def _cells(options: ReuseOptions) -> int:
    return max(options.contexts) + 2 * _ROOM


def _texts(path: str) -> list[str]:
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    found = (json.loads(line)["ctxs"][0] for line in lines)
    return [f"{it['title']}: {it['text']}" for it in found]


def _measured(
    kb: KnowledgeBase, engine: str, context: int, texts: list[str], options: ReuseOptions
) -> dict[str, Any]:
    """First tokens in seconds, medians over the orders, of which the first one warms up."""
    model = kb.model
    assert model is not None
    documents, given_tokens = list[str](), 0
    for text in texts:
        size = len(model.text_tokenizer().encode(text))
        if given_tokens + size > context - _ROOM // 2:
            break
        documents.append(text)
        given_tokens += size
    found: dict[str, list[float]] = {"full": [], "memory": [], "disk": [], "token": []}
    for repeat in range(options.repeats + 1):
        order = documents.copy()
        random.Random(repeat).shuffle(order)

        def ask(method: str, tokens: int, order: list[str] = order, repeat: int = repeat) -> Answer:
            settle()
            return generate(
                f"What do these say, in few words ({repeat})?", kb=kb, documents=order,
                method=method, max_new_tokens=tokens, batch_size=ROWS if engine != "jax" else 1,
            )  # fmt: skip

        full = ask("full_attention", 1)
        engine_of(model).forget()
        disk, memory = ask(options.method, 1), ask(options.method, options.tokens)
        chunk_tokens = memory.counts["reused"] + memory.counts["encoded"]
        answer_tokens = len(memory.token_ids)
        if repeat:  # all chunks are stored, and programs compiled
            assert not disk.counts["encoded"] and not memory.counts["encoded"]
            for name, result in (("full", full), ("disk", disk), ("memory", memory)):
                found[name].append(result.timings["ttft"])
            # The end of an answer is one step more.
            steps = answer_tokens - (memory.finish_reason == "length")
            found["token"].append(memory.timings["per_token"] * (answer_tokens - 1) / steps)
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {
        "engine": engine,
        "context": context,
        "passages": len(documents),
        "chunk_tokens": chunk_tokens,
        "answer_tokens": answer_tokens,
        **{f"{name}_seconds": medians[name] for name in ("full", "disk", "memory")},
        "full_over_disk": medians["full"] / medians["disk"],
        "full_over_memory": medians["full"] / medians["memory"],
        "token_ms": 1e3 * medians["token"],
        "bytes_per_token": kb.store.layout.stored_nbytes(1),
    }


def _plain(path: str, prompt: int, tokens: int, flash: int) -> float:
    """Milliseconds a token of llama.cpp alone, in a process of its own."""
    peer = str(Path(__file__).with_name("peer_llama.py"))
    command = [sys.executable, peer, path, "float16", path, str(flash)]
    asked = json.dumps({"ids": list(range(1000, 1000 + prompt)), "rows": 1, "tokens": tokens})
    ran = subprocess.run(command, input=asked, check=True, capture_output=True, text=True)
    return float(1e3 * json.loads(ran.stdout.splitlines()[-1])["seconds"] / tokens)


def _tokens(row: dict[str, Any]) -> int:
    """Of chunks and answer; earlier results have their sum alone."""
    return int(row["tokens"] if "tokens" in row else row["chunk_tokens"] + row["answer_tokens"])


def _told(row: dict[str, Any]) -> str:
    plain = row.get("plain_ms"), row.get("plain_without_flash_ms")
    return "" if None in plain else ", plain {:.1f}, without flash attention {:.1f}".format(*plain)


def report(result: Result) -> list[str]:
    """A line for each row."""
    line = "{engine:18} {tokens:5} tokens in all  full {full_seconds:6.2f} s"
    line += "  from disk {disk_seconds:.3f} s ({full_over_disk:.1f}x)"
    line += "  from memory {memory_seconds:.3f} s ({full_over_memory:.1f}x)"
    line += "  a token {token_ms:.1f} ms"
    return [line.format(**row | {"tokens": _tokens(row)}) + _told(row) for row in result["rows"]]


if __name__ == "__main__":
    sys.exit(run_script(__doc__, ReuseOptions, run, report))
