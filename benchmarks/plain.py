"""Passages pasted by common stacks: how much is read from KV, and how soon the first token comes.

A random model of the given size answers over a server's path (`generate(messages=...)`); the texts
are the files of Markdown or text below ``documents``, cut as splitters do.

- *second sight*: the share of the passages' characters that lie in blocks known from an earlier
  prompt, which had the same passages in another order and another question; of the prompts of six
  stacks, and of public projects that no rule was made with (benchmarks/stack_prompts.py);
- *stream*: questions whose passages are drawn by Zipf's law, some of the same passages again in
  another order and for another question, and talks of six turns: the share of the prompts' tokens
  whose KV was found, beside what a prefix cache of blocks of 16 tokens would find in the very same
  token ids, without bound; and seconds to the first token, from text, beside full attention asked
  in turn with it, and beside vLLM with its own prefix cache, which gets token ids over HTTP, if
  ``vllm_python`` names an interpreter that has it;
- *cut*: of one processor, milliseconds to find the passages of a prompt of 40,000 characters;
  seconds for 10 MB of delimiters, labels and brackets, and with it the longest such text that is
  cut.

example: python benchmarks/plain.py --out benchmarks/results/plain.json
"""

import contextlib
import dataclasses
import hashlib
import http.client
import itertools
import json
import random
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from script import Result, run_script
from stack_prompts import (
    HELD_OUT_SPLITTERS,
    KINDS,
    SPLITTERS,
    STACKS,
    Messages,
    Passages,
    Stack,
)
from tqdm import tqdm

from jaxrag.base.errors import RequestError
from jaxrag.base.options import option
from jaxrag.base.types import HostArray
from jaxrag.engine.engine import engine_of
from jaxrag.measure.bench.serve_peer import HttpPeer, vllm
from jaxrag.measure.machine import describe
from jaxrag.measure.zoo import llama
from jaxrag.models.model import Model, random_model
from jaxrag.models.spec import num_params
from jaxrag.models.text import byte_level
from jaxrag.models.text.passage_rules import PassageRules, passage_rules
from jaxrag.models.text.passages import MOST_CHARACTERS, cut
from jaxrag.models.text.tokenizer import Tokenizer
from jaxrag.serve.conversation import FoundChunk
from jaxrag.serve.generate import generate
from jaxrag.serve.plain import plain_prompt

_PAGE = 16  # tokens of a block of a prefix cache


class Found:
    """Answers with reuse and without: tokens from KV, and seconds to the first token.

    Encoding counts in the seconds, compiling does not.
    """

    def __init__(self, model: Model, method: str) -> None:
        self._model, self._method = model, method
        self._tokens = self._from_kv = self._of_passages = 0
        self.seconds, self._full = list[float](), list[float]()

    def ask(self, messages: Messages, first: bool) -> None:
        """Both ways, with reuse first or last."""
        for reuse in (first, not first):
            (self._ask if reuse else self._ask_plainly)(messages)

    def _ask(self, messages: Messages) -> None:
        result, seconds = self._timed(messages, method=self._method, plain="passages")
        rows = [it for it in result.reuse if it.part.startswith("chunk")]
        found = sum(it.tokens for it in rows if it.how == "chunk hit")
        self._of_passages += sum(it.tokens for it in rows)
        self._from_kv += found
        self._tokens += len(ids_of(self._model.text_tokenizer(), messages))
        self.seconds.append(seconds)

    def _ask_plainly(self, messages: Messages) -> None:
        self._full.append(self._timed(messages, method="full_attention")[1])

    def told(self) -> Result:
        """Shares of tokens from KV, seconds, and how many times sooner reuse was."""
        spent = {"reuse": self.seconds, "full_attention": self._full}
        seconds = {
            name: {f"p{at}": round(float(np.percentile(it, at)), 4) for at in (50, 95)}
            for name, it in spent.items()
        }
        ratio = float(np.median(np.array(self._full) / np.array(self.seconds)))
        return {
            "prompts": len(self.seconds),
            "prompt_tokens": round(self._tokens / len(self.seconds)),
            "of_prompts": round(self._from_kv / self._tokens, 4),
            "of_passages": round(self._from_kv / max(self._of_passages, 1), 4),
            "seconds": seconds,
            "sooner": round(ratio, 2),
        }

    def _timed(self, messages: Messages, **how: Any) -> tuple[Any, float]:
        begun = time.perf_counter()
        given: Any = {"messages": messages, "max_new_tokens": 1} | how
        result = generate(model=self._model, **given)
        took = time.perf_counter() - begun
        return result, took - result.timings["compile"]


class PrefixCache:
    """What a prefix cache without bound finds: whole blocks of tokens behind equal ones."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._seen = tokenizer, set[bytes]()
        self._found = self._tokens = 0

    def ask(self, messages: Messages) -> None:
        """The next prompt: its blocks are kept."""
        ids = ids_of(self._tokenizer, messages)
        name, matches = b"", True
        for at in range(0, len(ids) - _PAGE + 1, _PAGE):
            name = hashlib.blake2b(name + ids[at : at + _PAGE].tobytes()).digest()
            matches = matches and name in self._seen
            self._found += _PAGE * matches
            self._seen.add(name)
        self._tokens += len(ids)

    def share(self) -> float:
        """Of all tokens, those that were kept before."""
        return round(self._found / self._tokens, 4)


def ids_of(tokenizer: Tokenizer, messages: Messages) -> Any:
    """Token ids of the prompt that messages make, [T]."""
    prompt, _ = plain_prompt(tokenizer, messages, None)
    return np.concatenate([prompt.prefix, *prompt.chunks, prompt.final])


_KV_GIB = 4  # 54,000 tokens of a model of 100M parameters, more than a stream has
_TOLD = ("--enable-prompt-tokens-details",)  # how many tokens its prefix cache had


@contextlib.contextmanager
def started(python: str, model: Model, max_tokens: int) -> Iterator[HttpPeer | None]:
    """vLLM on the same weights until the block ends; None without a ``python`` that has it."""
    if not python:
        yield None
        return
    with tempfile.TemporaryDirectory() as name, vllm(
        python, model, Path(name), max_tokens, _TOLD, _KV_GIB
    ) as peer:  # fmt: skip
        asked(peer, np.arange(3, 67, dtype=np.int32), "warm-up")
        yield peer


def asked(peer: HttpPeer, ids: HostArray, salt: str) -> tuple[float, int]:
    """Seconds to the one token of an answer, and tokens of the prompt that were not computed.

    Raises RequestError where it refuses.
    """
    body = {
        "model": peer.model, "prompt": ids.tolist(), "max_tokens": 1, "temperature": 0,
        "ignore_eos": True, "cache_salt": salt,
    }  # fmt: skip
    sent, parts = json.dumps(body), urlsplit(peer.url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=600)
    try:
        begun = time.perf_counter()
        connection.request("POST", "/v1/completions", sent, {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        took = time.perf_counter() - begun
    finally:
        connection.close()
    if "error" in answer:
        raise RequestError(f"vLLM: {answer['error']}")
    details = answer["usage"].get("prompt_tokens_details") or {}
    return took, int(details.get("cached_tokens") or 0)


class Asked:
    """What it took over some prompts, one at a time."""

    def __init__(self, peer: HttpPeer, salt: str) -> None:
        """``salt``: prompts find what others of the same one have left, and nothing else."""
        self._peer, self._salt = peer, salt
        self._seconds = list[float]()
        self._cached = self._tokens = 0

    def ask(self, ids: HostArray) -> None:
        """The next prompt."""
        took, cached = asked(self._peer, ids, self._salt)
        self._seconds.append(took)
        self._cached += cached
        self._tokens += len(ids)

    def told(self, ours: list[float]) -> Result:
        """Share of tokens from its cache, seconds, and how many times as long as ``ours`` each."""
        theirs: Any = np.array(self._seconds)
        return {
            "of_prompts": round(self._cached / self._tokens, 4),
            "seconds": {f"p{at}": round(float(np.percentile(theirs, at)), 4) for at in (50, 95)},
            "reuse_sooner": round(float(np.median(theirs / np.array(ours))), 2),
        }


_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_HOSTILE = (
    "<source>", "[1] ", "---\n", "\n", "|\n", "title: x\n", "Label: x\n", "(a b", "a.\nB", " ",
    "\n```", "1. x\n2. y\n", "<a>x</b>", "=== x\n", "x | ", "a.b: ", "[[ x ]]\n",
)  # fmt: skip
_KINDS = ("questions", "again", "talks")
_AGAIN = 6  # prompts whose passages come a second time
_ASKED = ("What is said of the store?", "How is a chunk read?", "Which setting bounds this?")


@dataclasses.dataclass(frozen=True)
class Options:
    """What is asked, and of what."""

    documents: str = option("docs", "folder of .md and .txt files", "DIR")
    stacks: str = option("", "with streams, by ';'; none, or empty for all six", "NAMES")
    questions: int = option(40, "of a stack's stream", "N")
    talks: int = option(4, "of six turns, for each stack", "N")
    passages: int = option(8, "of a prompt", "N")
    layers: int = option(4, "of the model", "N")
    width: int = option(256, "of the model", "N")
    vocabulary: int = option(4096, "of the tokenizer", "N")
    method: str = option("turborag", "of reuse", "NAME")
    seed: int = option(0, "of every draw", "N")
    vllm_python: str = option("", "interpreter with vLLM, for the streams", "PATH")


def run(options: Options) -> Result:
    """All tables."""
    texts = _texts(Path(options.documents), "*.md", "*.txt")
    rules = passage_rules("common")
    model = _model(options, list(texts.values()))
    tokenizer = model.text_tokenizer()
    chunks = [(name, it) for name, text in texts.items() for it in _split(text)]
    with started(options.vllm_python, model, model.config.max_positions) as peer:
        streams = {
            name: _streamed(options, model, stack, chunks, peer)
            for name, stack in tqdm(STACKS.items(), "stacks", file=sys.stderr)
            if not options.stacks or name in options.stacks.split(";")
        }
    return {
        "options": {k: v for k, v in dataclasses.asdict(options).items() if k != "vllm_python"},
        "peer": peer and peer.about,
        "second_sight": _second_sights(options, tokenizer, rules, texts),
        "streams": streams,
        "cut": _cut_seconds(options, rules, chunks),
        "parameters": num_params(model.config),
        "machine": describe(),
    }


def _second_sights(
    options: Options, tokenizer: Tokenizer, rules: PassageRules, texts: Mapping[str, str]
) -> Result:
    others = {**HELD_OUT_SPLITTERS, **SPLITTERS}
    return {
        kind: {
            f"{name}, {split}": _second_sight(options, tokenizer, rules, stack, texts, by)
            for name, stack in stacks.items()
            for split, by in (SPLITTERS if kind == "stacks" else others).items()
        }
        for kind, stacks in tqdm(KINDS.items(), "second sight", file=sys.stderr)
    }


def _second_sight(
    options: Options,
    tokenizer: Tokenizer,
    rules: PassageRules,
    stack: Stack,
    texts: Mapping[str, str],
    split: Any,
) -> float:
    """The mean share over ten pairs of prompts."""
    draw = random.Random(options.seed)
    chunks = [(name, it) for name, text in texts.items() for it in split(text) if len(it) >= 200]
    shares = []
    for _ in range(10):
        passages = draw.sample(chunks, options.passages)
        first, second = draw.sample(_ASKED, 2)
        _, known = plain_prompt(tokenizer, stack(passages, first), rules)
        again = stack(draw.sample(passages, len(passages)), second)
        _, found = plain_prompt(tokenizer, again, rules)
        shares.append(_share(again, passages, found, {it.source.text for it in known}))
    return round(float(np.mean(shares)), 4)


def _share(
    messages: Messages, passages: Passages, blocks: Sequence[FoundChunk], known: set[str]
) -> float:
    """Of the passages' characters, those in blocks whose text is known."""
    spans = [
        (it.source.document_id, it.source.start, it.source.end)
        for it in blocks
        if it.source.text in known
    ]
    covered = sum(_covered(messages, text, spans) for _, text in passages)
    return covered / sum(len(text) for _, text in passages)


def _covered(messages: Messages, text: str, spans: Sequence[tuple[str, int, int]]) -> float:
    """Characters of a passage, written as it is or as JSON, that lie in known blocks."""
    for number, message in enumerate(messages):
        for form in (text, json.dumps(text, ensure_ascii=False)[1:-1]):
            at = message["content"].find(form)
            if at >= 0:
                covered = sum(
                    max(0, min(end, at + len(form)) - max(start, at))
                    for name, start, end in spans
                    if name == f"messages[{number}]"
                )
                return covered * len(text) / len(form)
    raise RequestError(f"a passage is not in its prompt: {text[:60]!r}")


def _streamed(
    options: Options,
    model: Model,
    stack: Stack,
    chunks: Sequence[tuple[str, str]],
    peer: HttpPeer | None,
) -> Result:
    """Questions and talks of one stack, with reuse, with full attention, and by vLLM, in turn."""
    draw = random.Random(options.seed)
    order = draw.sample(chunks, len(chunks))
    weights = [1 / rank for rank in range(1, len(order) + 1)]
    met = [
        (_drawn(draw, order, weights, options.passages), draw.choice(_ASKED))
        for _ in range(options.questions)
    ]
    talks = list(_talks(options, draw, stack, order))
    again = [
        (draw.sample(it, len(it)), draw.choice([other for other in _ASKED if other != question]))
        for it, question in met[-_AGAIN:]
    ]
    asked = {
        "questions": [stack(*it) for it in met],
        "again": [stack(*it) for it in reversed(again)],
        "talks": talks,
    }
    engine = engine_of(model)
    engine.memory.delete(list(engine.memory.keys()))
    engine.forget()
    told: Result = {}
    salt = uuid.uuid4().hex
    for kind, prompts in asked.items():
        reuse, prefix = Found(model, options.method), PrefixCache(model.text_tokenizer())
        theirs = peer and Asked(peer, salt)
        for at, messages in enumerate(prompts):
            reuse.ask(messages, first=at % 2 == 0)
            prefix.ask(messages)
            if theirs:
                theirs.ask(ids_of(model.text_tokenizer(), messages))
        told[kind] = reuse.told() | {"prefix_cache": prefix.share()}
        if theirs:
            told[kind]["vllm"] = theirs.told(reuse.seconds)
    return told


def _talks(
    options: Options, draw: random.Random, stack: Stack, chunks: Sequence[tuple[str, str]]
) -> Iterator[Messages]:
    """Talks whose passages are drawn anew at each turn, half of them from the turn before.

    Stacks paste into the message of the system or into the last one; those before are plain.
    """
    weights = [1 / rank for rank in range(1, len(chunks) + 1)]
    for _ in range(options.talks):
        said: Messages = []
        passages = _drawn(draw, chunks, weights, options.passages)
        for _ in range(6):
            kept = draw.sample(passages, options.passages // 2)
            new = _drawn(draw, chunks, weights, 2 * options.passages)
            passages = [
                *[it for it in new if it not in kept][: options.passages - len(kept)],
                *kept,
            ]
            question = draw.choice(_ASKED)
            *first, last = stack(passages, question)
            yield [*first[:1], *said, *first[1:], last]
            said += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": "It is as the passages say."},
            ]


def _drawn(
    draw: random.Random, chunks: Sequence[Any], weights: Sequence[float], count: int
) -> list[Any]:
    """So many different ones, by weight."""
    keys = [draw.random() ** (1 / weight) for weight in weights]
    best = sorted(range(len(chunks)), key=keys.__getitem__, reverse=True)[:count]
    draw.shuffle(best)
    return [chunks[it] for it in best]


def _cut_seconds(
    options: Options, rules: PassageRules, chunks: Sequence[tuple[str, str]]
) -> Result:
    draw = random.Random(options.seed)
    spent: Result = {}
    for name, stack in STACKS.items():
        times = []
        for _ in range(9):
            texts = [it["content"] for it in stack(draw.sample(chunks, 44), _ASKED[0])]
            begun = time.thread_time()
            for text in texts:
                cut(text, rules)
            times.append(time.thread_time() - begun)
        spent[name] = round(1000 * float(np.median(times)), 2)
    worst = {}
    for line in _HOSTILE:
        text = (line * (10_000_000 // len(line)))[:10_000_000]
        begun = time.thread_time()
        cut(text[:MOST_CHARACTERS], rules)
        cut(text, rules)
        worst[line] = round(time.thread_time() - begun, 2)
    return {"milliseconds": spent, "hostile_seconds": worst}


def _texts(folder: Path, *patterns: str) -> dict[str, str]:
    """Files of some length, by name. Raises RequestError where there are none."""
    found = {
        str(it.relative_to(folder)): it.read_text(encoding="utf-8", errors="replace")
        for pattern in patterns
        for it in sorted(folder.rglob(pattern))
        if it.stat().st_size > 1000
    }
    if not found:
        raise RequestError(f"{folder}: no {' or '.join(patterns)} of 1,000 bytes and more")
    return found


def _split(text: str) -> list[str]:
    return [it for it in next(iter(SPLITTERS.values()))(text) if len(it) >= 200]


def _model(options: Options, texts: Sequence[str]) -> Model:
    """A random Llama with a byte-level tokenizer of the texts, and ChatML."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    made = byte_level.train(texts, options.vocabulary, specials)
    settings = {"eos_token": "<|im_end|>", "add_bos_token": False}
    tokenizer = Tokenizer(made.to_str().encode(), settings, {"default": _CHATML})
    config = llama(
        vocab_size=options.vocabulary,
        num_layers=options.layers,
        model_dim=options.width,
        mlp_dim=3 * options.width,
        num_heads=options.width // 64,
        num_kv_heads=options.width // 64,
        head_dim=64,
        max_positions=16384,
        eos_ids=(2,),
    )
    return random_model(config, options.seed, cache_tokens=32768, tokenizer=tokenizer)


def report(result: Result) -> Iterator[str]:
    """The tables as text."""
    yield f"{'second sight, another order':50} share"
    for shares in result["second_sight"].values():
        yield from (f"{name:50} {share:.3f}" for name, share in shares.items())
        yield f"{'mean':50} {np.mean(list(shares.values())):.3f}"
    yield f"{'stack':26} {'':10} passages  prompt  prefix cache  p50 s  full  sooner"
    for (name, told), kind in itertools.product(result["streams"].items(), _KINDS):
        one = told[kind]
        spent = one["seconds"]
        yield (
            f"{name:26} {kind:10} {one['of_passages']:8.3f} {one['of_prompts']:7.3f} "
            f"{one['prefix_cache']:13.3f} {spent['reuse']['p50']:6.3f} "
            f"{spent['full_attention']['p50']:5.3f} {one['sooner']:7.2f}"
        )
        if theirs := one.get("vllm"):
            yield (
                f"{'  vLLM':26} {kind:10} {'':8} {'':7} {theirs['of_prompts']:13.3f} {'':6} "
                f"{theirs['seconds']['p50']:5.3f} {theirs['reuse_sooner']:7.2f}"
            )
    took = result["cut"]
    yield (
        f"cut: {max(took['milliseconds'].values()):.1f} ms for 40,000 characters; "
        f"{max(took['hostile_seconds'].values()):.2f} s for 10 MB at worst"
    )


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, Options, run, report))
