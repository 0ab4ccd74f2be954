"""What the system answers, recorded from one tree and checked against another.

    python tests/net/net.py record --to tests/goldens/net
    python tests/net/net.py check [--only village] [--few 3]

Each part is a file of arrays:

- village, valley: the shipped models dual and long-dual over the documents of examples/. Of every
  method, selector, encoder, file of configs/methods and decode rule the tokens of 20 greedy answers
  (sampled one at a time with a least length, and plain in a batch), the 16 likeliest first tokens,
  and how many tokens were computed again; of a few prompts some logits of packed forwards.
- smollm2: the same, fewer, of a pretrained model (`make real`); left out without it.
- hits: what 300 questions find by words, vectors and both, with and without a filter.

Names of options and of what is public are in tests/test_public_names.py.

Tokens must be equal up to a step at which the two best are closer than 1e-3, which rounding may
turn round; such steps are counted. Numbers may differ by 1e-4, scores of hits by 1e-5.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import gzip
import itertools
import json
import os
import re
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":  # as tests/conftest.py sets them for tests
    os.environ.setdefault("JAXRAG_FORMS", "default")  # not what was measured on this machine
    os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")

import numpy as np

import jaxrag
from jaxrag.base.types import FINAL, FIRST_CHUNK
from jaxrag.engine.engine import engine_of
from jaxrag.reuse.decode import DECODE_RULES
from jaxrag.reuse.encode import ENCODERS, Primer
from jaxrag.reuse.encode.primer import PrimerVectors, write_vectors
from jaxrag.reuse.select import SELECTORS, selector_from
from jaxrag.tasks.synthetic import SyntheticTask, sample

ROOT = Path(__file__).resolve().parents[2]
GOLDENS = ROOT / "tests" / "goldens" / "net"
EXAMPLES = ROOT / "examples"
SHIPPED = ROOT / "checkpoints" / "synthetic-0.8m"
SMOLLM2 = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTIONS, HITS, TOP, STEPS = 20, 300, 16, 20
NEAR = 1e-3  # two logits
CLOSE = {"values": 1e-4, "likely": 1e-4, "scores": 1e-5}  # absolute and relative
# Settings under which a rule chooses among the keys of a prompt of a hundred tokens.
RULES = {
    "dense": "dense",
    "static_window": "static_window:sink=4,recent=24",
    "snapkv": "snapkv:capacity=24,window=4",
    "infllm": "infllm:block=8,blocks=4,representatives=2,sink=4,recent=24",
    "quest": "quest:budget=32,dense_layers=1",
    "flat": "flat:k=3,sink=2,recent=8",
    "ivf": "ivf:k=3,sink=2,recent=8,index=ivf,index.clusters=4,index.probes=2,index.exact_below=0",
    "retrieval": "retrieval:k=3,sink=2,recent=8",
    "topn": "topn:n=4",
}

type Arrays = dict[str, np.ndarray]


def cases() -> dict[str, dict[str, Any]]:
    """What is asked for, by name, as ``jaxrag.generate`` takes it."""
    files = sorted((ROOT / "configs" / "methods").glob("*.toml"))
    files = [it for it in files if "in_place" not in it.stem]  # answers by what was asked before
    selectors = {name: selector_from(name) for name in SELECTORS if name not in ("none", "all")}
    method = functools.partial(jaxrag.Method, encoder="after_prefix", recompute_ratio=0.3)
    return {
        **{f"method {it}": {"method": it} for it in jaxrag.METHODS},
        **{f"file {it.stem}": {"method": str(it)} for it in files},
        **{f"selector {it}": {"method": method(it, selector=by)} for it, by in selectors.items()},
        **{f"encoder {it}": {"method": jaxrag.Method(it, it)} for it in ENCODERS},
        **{f"rule {it}": {"method": "turborag", "decode": RULES[it]} for it in DECODE_RULES},
    }


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model and what it is asked: questions of a file, each over the next of a folder's texts."""

    model: Path
    folder: str
    questions: str
    chunks: int  # a question
    kept: bool = False  # in a knowledge base, and not in memory
    characters: int = 10_000
    most: int = QUESTIONS

    def prompts(self, few: int) -> list[tuple[str, list[str]]]:
        """Questions with their chunks."""
        texts = [it.text[: self.characters] for it in documents(self.folder) if it.text.isascii()]
        chunks = itertools.batched(itertools.cycle(texts), self.chunks)
        questions = itertools.cycle(asked(self.questions))
        few = min(few, self.most)
        return [(next(questions), list(it)) for it in itertools.islice(chunks, few)]


SUBJECTS = {
    "village": Subject(SHIPPED / "dual", "village", "village-questions.jsonl", 5, kept=True),
    "valley": Subject(SHIPPED / "long-dual", "valley", "valley-questions.jsonl", 4),
    "smollm2": Subject(SMOLLM2, "documents", "questions.jsonl", 4, characters=600, most=4),
}


def documents(*folders: str) -> list[jaxrag.Document]:
    """Those of folders of examples/."""
    found = jaxrag.read_paths([EXAMPLES / folder for folder in folders])
    return [it for it in found if isinstance(it, jaxrag.Document)]


def asked(*names: str) -> list[str]:
    """Questions of the files of examples/."""
    lines = [row for name in names for row in (EXAMPLES / name).read_text().splitlines()]
    return [json.loads(row)["question"] for row in lines]


def answers(ask: Mapping[str, Any], prompts: Sequence[Any], model: jaxrag.Model) -> Arrays:
    """Tokens [Q, N]; the likeliest first and last ones [Q, 2, 16]; until where all is certain [Q].

    Then the same at once, as they end: tokens [Q, N], -1 behind the end, and how many tokens of
    chunks were computed again [Q].
    """
    sampling = jaxrag.SamplingParams(min_tokens=STEPS, top_logprobs=TOP)
    engine, found = engine_of(model), []
    whole: dict[str, Any] = {**ask, "model": model, "max_new_tokens": STEPS}
    whole["neighbours"] = "prompt"
    for question, chunks in prompts:
        tops: list[Any] = []

        def watched(request: Any, sink: Any, add: Any = engine.add, tops: Any = tops) -> int:
            return int(add(request, lambda news: (tops.extend(news.top), sink(news))[1]))

        options = {**whole, "documents": chunks, "sampling": sampling}
        stream = jaxrag.generate(question, stream=True, **options)
        with mock.patch.object(engine, "add", watched):
            list(stream)
        assert stream.result is not None
        margins = [top[0][1] - top[1][1] for top in tops]
        safe = next((step for step, it in enumerate(margins) if it < NEAR), STEPS)
        ids, values = zip(*(zip(*top, strict=True) for top in (tops[0], tops[-1])), strict=True)
        found.append((stream.result.token_ids, ids, values, safe))
    names = ("tokens", "ids", "likely", "safe")
    arrays = dict(zip(names, map(np.array, zip(*found, strict=True)), strict=True))
    results = asyncio.run(together(prompts, whole))
    ended = [it.token_ids + [-1] * (STEPS - len(it.token_ids)) for it in results]
    again = [it.counts["recomputed"] for it in results]
    return arrays | {"plain": np.array(ended), "again": np.array(again)}


async def together(prompts: Sequence[Any], whole: Mapping[str, Any]) -> list[jaxrag.Result]:
    """Answers of all prompts at once."""
    results: list[jaxrag.Result] = await asyncio.gather(
        *(jaxrag.agenerate(question, documents=chunks, **whole) for question, chunks in prompts)
    )
    return results


def logits(model: jaxrag.Model, prompts: Sequence[Any]) -> Arrays:
    """Some logits of packed forwards [Q, 2, places, ids]: causal, and over blocks."""
    found = []
    for question, chunks in prompts[:6]:
        parts = [model.text_tokenizer().encode(text) for text in (*chunks, question)]
        ids = np.concatenate(parts)[None]
        lengths = [len(part) for part in parts]
        blocks = np.repeat([*range(FIRST_CHUNK, FIRST_CHUNK + len(chunks)), FINAL], lengths)[None]
        places = np.linspace(0, ids.shape[1] - 1, 8).astype(int)
        some = np.linspace(0, model.config.vocab_size - 1, 16).astype(int)
        both = (model.logits(ids), model.logits(ids, segments=blocks))
        found.append([np.asarray(it)[0][np.ix_(places, some)] for it in both])
    return {"values": np.array(found, np.float64)}


def of_model(part: str, few: int, only: str) -> Arrays:
    """Some logits, and all cases whose name fits."""
    subject = SUBJECTS[part]
    model, prompts = jaxrag.load_model(subject.model, dtype="float32"), subject.prompts(few)
    found = {"logits": logits(model, prompts)}
    with tempfile.TemporaryDirectory() as work, contextlib.ExitStack() as stack:
        base = Path(work, "kb")
        opened = jaxrag.KnowledgeBase.open(base, model, stored="native") if subject.kept else None
        kb = opened and stack.enter_context(opened)
        asks = cases() | {"method packets": {"method": between(model, Path(work)), "kb": None}}
        for name, ask in asks.items():
            if not re.match(only, name):
                continue
            try:
                found[name] = answers({"kb": kb, **ask}, prompts, model)
            except jaxrag.JaxragError as error:
                found[name] = {"refused": np.array(type(error).__name__)}
    return {f"{name}/{key}": it for name, arrays in found.items() for key, it in arrays.items()}


def between(model: jaxrag.Model, folder: Path) -> jaxrag.Method:
    """Chunks between vectors that are embeddings of some tokens, of a file in the folder."""
    vectors = PrimerVectors.of(model.digest, np.asarray(model.params.embed)[7:13], header=4)
    path = folder / "packets.safetensors"
    write_vectors(Primer(path.stem, vectors=vectors), path)
    return dataclasses.replace(jaxrag.METHODS["packets"], primer=str(path))


def hits(few: int, only: str) -> Arrays:
    """Documents, places and scores of what is found, of each way to search."""
    drawn = [sample(SyntheticTask(places=1), 7, index) for index in range(60)]
    texts = [text for it in drawn for text in it.chunks]
    corpus = [jaxrag.Document(f"{i}", it, metadata={"at": i}) for i, it in enumerate(texts)]
    questions = asked("village-questions.jsonl", "valley-questions.jsonl")
    questions += [question.question for it in drawn for question in it.questions]
    model = jaxrag.load_model(SHIPPED / "dual")
    found = {}
    with tempfile.TemporaryDirectory() as work:
        kb = jaxrag.KnowledgeBase.open(work, model, chunk_tokens=60, overlap=0, embedder=embedded)
        kb.add([*corpus, *documents("village", "valley")])
        for mode in ("bm25", "vector", "hybrid"):
            for where in (None, {"at": {"$gte": 99}}):
                each = kb.search(questions[: few * HITS // QUESTIONS], 5, where=where, mode=mode)
                ids = [[f"{hit.document_id}#{hit.chunk_index}" for hit in it] for it in each]
                scores = [[hit.score for hit in it] for it in each]
                name = f"{mode}{' filtered' * bool(where)}"
                found[f"{name}/found"] = np.array([[*it, *[""] * 5][:5] for it in ids])
                found[f"{name}/scores"] = np.array([[*it, *[0.0] * 5][:5] for it in scores])
        kb.close()
    return {name: it for name, it in found.items() if re.match(only, name)}


def embedded(words: Sequence[str]) -> np.ndarray:
    """Vectors of length 1 from the letters of texts, three by three."""
    vectors = np.zeros((len(words), 64), np.float32)
    for row, text in zip(vectors, words, strict=True):
        for at in range(len(text) - 2):
            row[zlib.crc32(text[at : at + 3].lower().encode()) % 64] += 1
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)


PARTS: dict[str, Callable[[int, str], Arrays]] = {
    **{part: functools.partial(of_model, part) for part in SUBJECTS},
    "hits": hits,
}


@dataclasses.dataclass
class Verdict:
    """How many rows were compared, which differ, by how much at most, and answers cut short."""

    compared: int = 0
    differ: list[str] = dataclasses.field(default_factory=list)
    worst: float = 0.0
    cut: int = 0


def compare(golden: Mapping[str, np.ndarray], now: Arrays) -> Verdict:
    """Arrays of one part, of which ``now`` may have fewer rows; what only one has differs."""
    verdict = Verdict(differ=[f"{name}: not there" for name in golden if name not in now])
    for name, is_now in now.items():
        if name not in golden:
            verdict.differ.append(f"{name}: not in the golden")
            continue
        was = golden[name][: len(is_now)] if is_now.ndim else golden[name]
        if was.shape != is_now.shape:
            verdict.differ.append(f"{name}: {is_now.shape}, was {was.shape}")
            continue
        certain = certain_of(golden, name)
        certain = certain[: len(is_now)] if is_now.ndim else certain
        wrong = certain & (is_now != was)
        if by := CLOSE.get(name.rpartition("/")[2]):
            away = np.where(certain, np.abs(is_now - was), 0)
            wrong = away > by * (1 + np.abs(was))
            verdict.worst = max(verdict.worst, float(away.max()))
        rows = wrong.reshape(len(is_now), -1).any(axis=1) if is_now.ndim else wrong[None]
        verdict.compared += len(rows)
        verdict.cut += int((~certain).any(axis=1).sum()) if name.endswith("/tokens") else 0
        if rows.any():
            verdict.differ.append(f"{name}: {int(rows.sum())} of {len(rows)}")
    return verdict


def certain_of(golden: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """Which entries of an array of the golden rounding cannot turn round."""
    case, _, key = name.rpartition("/")
    certain = np.full(golden[name].shape, key != "safe")
    if key in ("tokens", "plain"):
        certain &= np.arange(certain.shape[1]) < golden[f"{case}/safe"][:, None]
    if key in ("ids", "likely"):
        ended = golden[f"{case}/safe"] == golden[f"{case}/tokens"].shape[1]
        certain[:, 1] &= ended[:, None]
    if key == "ids":  # of neighbours that are as likely, and of the last, whose next is not known
        apart = -np.diff(golden[f"{case}/likely"]) > NEAR
        certain[..., 1:] &= apart
        certain[..., :-1] &= apart
        certain[..., -1] = False
    return certain


def write(found: Arrays, path: Path) -> None:
    """The golden of a part: the same bytes for the same numbers."""
    rounded = {name: it.round(6) if it.dtype.kind == "f" else it for name, it in found.items()}
    text = json.dumps({name: it.tolist() for name, it in rounded.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def read(path: Path, only: str = "") -> Arrays:
    """What ``write`` wrote, of the cases whose name fits."""
    found = json.loads(gzip.decompress(path.read_bytes()))
    fits = re.compile(f"logits|{only}")
    of_case = {name: name.rpartition("/")[0] for name in found}
    return {name: np.array(it) for name, it in found.items() if fits.match(of_case[name])}


def main() -> int:
    """Record or check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("record", "check"):
        command = commands.add_parser(name)
        command.add_argument("--only", choices=PARTS, action="append", help="(all)")
        command.add_argument("--to" if name == "record" else "--against", dest="folder", type=Path,
                             default=GOLDENS, help="(tests/goldens/net)")  # fmt: skip
        command.add_argument("--cases", default="", help="that a regular expression fits (all)")
        command.add_argument("--few", type=int, default=QUESTIONS, help=f"answers ({QUESTIONS})")
    args = parser.parse_args()
    failed, began = False, time.monotonic()
    for part in args.only or PARTS:
        if part == "smollm2" and not SMOLLM2.is_file():
            print("smollm2: left out, as its weights are not there: `make real` fetches them")
            continue
        golden = args.folder / f"{part}.json.gz"
        if args.command == "check" and not golden.is_file():
            print(f"{part}: left out, as {golden} is not there: record it")
            continue
        now = PARTS[part](args.few, args.cases)
        if args.command == "record":
            write(now, golden)
            print(f"{part}: {len(now)} arrays")
            continue
        verdict = compare(read(golden, args.cases), now)
        print(f"{part}: {verdict.compared} rows compared, {len(verdict.differ)} arrays differ, "
              f"by {verdict.worst:.2g} at most; {verdict.cut} answers cut short, "
              f"{time.monotonic() - began:.0f} s")  # fmt: skip
        for line in verdict.differ:
            print(f"  {line}")
        failed |= bool(verdict.differ)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
