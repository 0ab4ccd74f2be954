"""First token of vLLM over stored chunks, beside full prefill and its own prefix cache.

Starts vLLM's server with the connector on a random Llama, encodes chunks into a repository, and
asks questions over some of them in an order that did not come before. Each is asked three ways,
one after the other, one request at a time: all computed; over stored chunks; and once more, when
vLLM has the pages of the stored ones itself. Every answer says how many tokens were loaded. Then
the last two are asked again while another answer is streamed, whose tokens are timed: what is
between them is the loads.

example: python benchmarks/vllm_connector.py --vllm-python VLLM_PYTHON --rounds 20
"""

import dataclasses
import http.client
import json
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy as np
from script import Result, run_script

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import RequestError
from jaxrag.base.options import option, parse_count
from jaxrag.base.types import HostArray
from jaxrag.connectors import manifest
from jaxrag.kv.store import ChunkStore, content_id
from jaxrag.measure.bench.serve_peer import vllm, write_model
from jaxrag.measure.machine import describe
from jaxrag.measure.zoo import SMALL_LLAMA, llama, random_named
from jaxrag.models.model import Model, load_model, random_model
from jaxrag.reuse.encode import ChunkEncoding, ChunkInContext
from jaxrag.serve.connector_files import parts_table, write_manifest

# By parameters. What the larger one computes for a token grows more than what it keeps of it.
MODELS = {
    "5M": SMALL_LLAMA,
    "77M": llama(
        num_layers=12, model_dim=768, mlp_dim=2048, num_heads=12, num_kv_heads=4, head_dim=64,
        vocab_size=2000, eos_ids=(),
    ),
}  # fmt: skip
FULL, STORED, AGAIN = "full prefill", "stored chunks", "vLLM's own prefix hit"


@dataclasses.dataclass(frozen=True)
class Options:
    """What is asked."""

    model: Literal["5M", "77M"] = option("5M", "parameters of the random Llama")
    rounds: int = option(20, "questions, each asked three ways", "N", parse=parse_count)
    chunks: int = option(4, "chunks of a question", "N", parse=parse_count)
    chunk_tokens: int = option(1024, "tokens of a chunk", "N", parse=parse_count)
    library: int = option(12, "chunks that are stored", "N", parse=parse_count)
    final: int = option(32, "tokens of a question", "N", parse=parse_count)
    vllm_python: str = option("", "interpreter with vLLM and jaxrag-connector", "PATH")


def main() -> int:
    """Run, print and write; returns the exit code."""
    return run_script(__doc__, Options, measure, report, markdown=page)


def measure(options: Options) -> Result:
    """Every round in turn, against one server."""
    if not options.vllm_python:
        raise RequestError("--vllm-python: name an interpreter with vLLM and jaxrag-connector")
    most = 64 + options.chunks * options.chunk_tokens + options.final
    config = dataclasses.replace(MODELS[options.model], max_positions=most)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prefix, library = prepare(folder, config, options)
        connector = {
            "kv_connector": "JaxragConnector",
            "kv_connector_module_path": "jaxrag.connectors.vllm",
            "kv_role": "kv_consumer",
            "kv_connector_extra_config": {"manifest": str(folder / "manifest")},
        }
        more = ("--kv-transfer-config", json.dumps(connector))
        model = load_model(folder / "model")
        with vllm(options.vllm_python, model, folder, most, more) as peer:
            took = ask_all(peer.url, prefix, library, options)
            gaps = beside(peer.url, prefix, library, options)
            about = dict(peer.about)
    return {
        "machine": describe(),
        "model": random_named(config, shape=True),
        "options": {k: v for k, v in dataclasses.asdict(options).items() if k != "vllm_python"},
        "peer": about,
        "prompt_tokens": len(prefix) + options.chunks * options.chunk_tokens + options.final,
        "milliseconds": took,
        "arms": {name: summary(values) for name, values in took.items()},
        "stream_gaps": {name: summary(values) for name, values in gaps.items()},
        "times_sooner": median(took[FULL]) / median(took[STORED]),
    }


def prepare(
    folder: Path, config: ModelConfig, options: Options
) -> tuple[HostArray, list[HostArray]]:
    """A model, a repository of its chunks and a manifest; the prefix's ids and the chunks'."""
    write_model(random_model(config), folder / "model")
    model = load_model(folder / "model")
    draw = np.random.default_rng(0)
    prefix = draw.integers(3, config.vocab_size, 32).astype(np.int32)
    size = (options.library, options.chunk_tokens)
    library = list(draw.integers(3, config.vocab_size, size).astype(np.int32))
    store = ChunkStore.open(folder / "store", model.fingerprint, model.kv_layout, mode="rw")
    encoding = ChunkEncoding(model, store, prefix)
    encoding.keep_prefix()
    wanted = {encoding.key("isolated", ids): ChunkInContext(ids) for ids in library}
    encoding.encode_missing("isolated", wanted)
    store.close()
    write_engine(folder, model, prefix, library)
    return prefix, library


def write_engine(folder: Path, model: Model, prefix: HostArray, library: list[HostArray]) -> None:
    """What the connector reads."""
    digest = model.text_tokenizer().digest
    engine = manifest.ServedModel(
        store=str(folder / "store"),
        fingerprint=model.fingerprint,
        layout=model.kv_layout,
        rope=model.config.rope,
        tokenizer=digest,
        weights=manifest.weights_of(folder / "model", folder / "memo.json"),
        encoder="isolated",
    )
    table = parts_table((content_id(digest, ids), ids) for ids in library)
    gate = manifest.Gate("turborag", 0, 0)  # random weights: nobody takes the answers for answers
    write_manifest(folder / "manifest", manifest.Manifest(engine, prefix, (gate,), table))


def ask_all(
    url: str, prefix: HostArray, library: list[HostArray], options: Options
) -> dict[str, list[float]]:
    """Milliseconds of every request by arm; the first round is a warm-up and not among them."""
    draw = np.random.default_rng(1)
    took: dict[str, list[float]] = {name: [] for name in (FULL, STORED, AGAIN)}
    for number in range(options.rounds + 1):
        ids, salt = drawn(draw, prefix, library, options)
        for name in took:
            ms = ask_as(name, url, ids, salt, options.final)
            if number:
                took[name].append(ms)
        print(f"round {number} of {options.rounds}", file=sys.stderr)
    return took


def drawn(
    draw: np.random.Generator, prefix: HostArray, library: list[HostArray], options: Options
) -> tuple[list[int], str]:
    """The ids of a question over some of the chunks, and a salt that none before it had."""
    chosen = draw.permutation(len(library))[: options.chunks]
    final = draw.integers(3, 1000, options.final)
    ids = np.concatenate([prefix, *(library[at] for at in chosen), final]).tolist()
    return ids, uuid.uuid4().hex


def ask_as(name: str, url: str, ids: list[int], salt: str, final: int) -> float:
    """Milliseconds to the first token. Raises RequestError where it was not answered that way."""
    whole = len(ids) - final
    ms, told, cached = ask(url, ids, {"off": True} if name == FULL else {}, salt)
    if told != (0 if name == FULL else whole) or (name == AGAIN and cached < whole - 32):
        raise RequestError(f"{name}: {told} tokens stored, {cached} cached of {whole}")
    return ms


def beside(
    url: str, prefix: HostArray, library: list[HostArray], options: Options
) -> dict[str, list[float]]:
    """Milliseconds between the tokens of another answer while questions are asked, by their arm.

    A question is asked every quarter of a second, over stored chunks and once more, in blocks of
    five in turn; gaps count to the arm that is asked at their end.
    """
    draw = np.random.default_rng(2)
    gaps: dict[str, list[float]] = {STORED: [], AGAIN: []}
    now: list[str | None] = [None]
    ended = threading.Event()

    def stream() -> None:
        while not ended.is_set():
            last = None
            for moment in token_times(url, draw.integers(3, 1000, 64).tolist(), 128):
                if last is not None and (name := now[0]) is not None:
                    gaps[name].append(1e3 * (moment - last))
                last = moment

    thread = threading.Thread(target=stream)
    thread.start()
    try:
        for _ in range(max(1, options.rounds // 5)):
            asked = [drawn(draw, prefix, library, options) for _ in range(5)]
            for name in gaps:
                for ids, salt in asked:
                    now[0] = name
                    ask_as(name, url, ids, salt, options.final)
                    time.sleep(0.25)
                now[0] = None
    finally:
        ended.set()
        thread.join()
    return gaps


def token_times(url: str, ids: list[int], count: int) -> Iterator[float]:
    """When each token of a streamed answer arrived, in seconds."""
    body = {
        "model": "model", "prompt": ids, "max_tokens": count, "temperature": 0, "ignore_eos": True,
        "stream": True, "kv_transfer_params": {"jaxrag": {"off": True}},
    }  # fmt: skip
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=300)
    head = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), head)
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            yield time.perf_counter()
    connection.close()


def ask(url: str, ids: list[int], say: dict[str, Any], salt: str) -> tuple[float, int, int]:
    """Milliseconds to the first token, tokens of stored parts, tokens that were not computed."""
    body = {
        "model": "model", "prompt": ids, "max_tokens": 1, "temperature": 0, "cache_salt": salt,
        "ignore_eos": True, "kv_transfer_params": {"jaxrag": say},
    }  # fmt: skip
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=300)
    sent = json.dumps(body)
    begun = time.perf_counter()
    connection.request("POST", "/v1/completions", sent, {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    took = 1e3 * (time.perf_counter() - begun)
    connection.close()
    if "error" in answer:
        raise RequestError(f"vLLM: {answer['error']}")
    told = (answer.get("kv_transfer_params") or {}).get("jaxrag", {})
    details = answer["usage"].get("prompt_tokens_details") or {}
    return took, int(told.get("stored", 0)), int(details.get("cached_tokens") or told["stored"])


def median(values: list[float]) -> float:
    """The middle of them."""
    return float(np.median(values))


def summary(values: list[float]) -> dict[str, float]:
    """What is told of an arm, milliseconds."""
    return {
        "p50": round(median(values), 1),
        "p95": round(float(np.percentile(values, 95)), 1),
        "least": round(min(values), 1),
    }


def report(result: Result) -> list[str]:
    """The table."""
    rows = ["| first token, ms | p50 | p95 | least |", "|---|---|---|---|"]
    for name, one in result["arms"].items():
        rows.append(f"| {name} | {one['p50']} | {one['p95']} | {one['least']} |")
    rows += ["", f"stored chunks: {result['times_sooner']:.1f} times sooner at p50", ""]
    rows += ["| another answer's tokens, ms apart | p50 | p95 | least |", "|---|---|---|---|"]
    for name, one in result["stream_gaps"].items():
        rows.append(f"| while asked: {name} | {one['p50']} | {one['p95']} | {one['least']} |")
    return rows


def page(result: Result) -> str:
    """The result as a page."""
    options = result["options"]
    about = (
        f"{result['model']}; {options['chunks']} chunks of {options['chunk_tokens']} tokens a "
        f"question, {result['prompt_tokens']} tokens in all; {options['rounds']} rounds, the three "
        "ways in turn, one request at a time over HTTP."
    )
    return "\n".join(["# vLLM over stored chunks", "", about, "", *report(result), ""])


if __name__ == "__main__":
    sys.exit(main())
