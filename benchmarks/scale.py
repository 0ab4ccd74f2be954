"""How a knowledge base grows: what adding, searching and keeping it cost at every size.

Chunks are mixed of the sentences of real texts. The first --kv of them are added as any document
is, with KV of a random model of one layer; the rest comes into the catalog and the vector index
without KV, so that these two are what is measured. Vectors are sums of word vectors, which cost
next to nothing. A run that was cut short goes on in the same --folder; it measures in a process of
its own at each of --sizes, and ends after --minutes.

With --questions, whether searches of a knowledge base that was grown find what looking at
everything finds: the passages of HotpotQA and of RGB in Chinese are added to it, and their
questions are asked: by words, held against the sums of all postings; by vectors, held against the
products of all vectors; and by both. Each question whose 10 hits differ is listed.

example: python benchmarks/scale.py --texts TEXTS --folder /tmp/scale --sizes 10000,60000
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import batched
from pathlib import Path
from typing import Any

import numpy as np

from jaxrag.base.types import HostArray
from jaxrag.cli import run_command
from jaxrag.cli.output import give_out, require_folder
from jaxrag.library.catalog import NewDocument
from jaxrag.library.documents import Document
from jaxrag.library.documents.chunking import Chunk
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.library.options import SearchMode
from jaxrag.library.retrieve.base import Found, searched_text
from jaxrag.library.retrieve.lance import VectorIndex
from jaxrag.library.retrieve.retrievers import fuse
from jaxrag.library.retrieve.terms import terms
from jaxrag.measure.machine import describe
from jaxrag.measure.zoo import llama
from jaxrag.models.model import Model, random_model
from jaxrag.models.text import byte_level
from jaxrag.models.text.tokenizer import Tokenizer

_ENDS = re.compile("(?<=[.!?])\\s+|(?<=[\u3002\uff01\uff1f])")
_CJK = re.compile(r"[\u4e00-\u9fff]")
_SENTENCES = 4  # of a chunk
_EXCHANGED = 0.1  # of the words of an English sentence
_CHINESE = 0.25  # of the chunks


class Texts:
    """Sentences and questions of a folder of JSON, JSON lines and text files."""

    def __init__(self, folder: Path) -> None:
        """Read them. Raises ValueError for a folder without sentences."""
        english, chinese = dict[str, None](), dict[str, None]()
        questions = dict[str, None]()
        for path in sorted(folder.rglob("*")):
            if path.suffix not in (".json", ".jsonl", ".txt") or "kv-retrieval" in path.parts:
                continue
            for name, text in _strings(path):
                if name in ("question", "query") and len(text) < 300:
                    questions[text] = None
                    continue
                for sentence in _ENDS.split(text[:200_000]):
                    if _CJK.search(sentence) and 12 <= len(sentence) <= 120:
                        chinese[sentence] = None
                    elif 40 <= len(sentence) <= 250 and not _CJK.search(sentence):
                        english[sentence] = None
        if not english:
            raise ValueError(f"{folder} holds no sentences")
        self.english = [one.split() for one in english]
        self.chinese = list(chinese)
        self.words = sorted({word for one in self.english for word in one})
        known = list(questions)
        foreign = [it for it in known if _CJK.search(it)]
        self.questions = [it for it in known if not _CJK.search(it)], foreign

    def chunk(self, number: int) -> str:
        """The text of a chunk, about 80 words or 200 characters; the same for the same number."""
        rng = np.random.default_rng([41, number])
        if self.chinese and rng.random() < _CHINESE:
            return "".join(self.chinese[i] for i in rng.integers(len(self.chinese), size=6))
        found = []
        for place in rng.integers(len(self.english), size=_SENTENCES):
            words = list(self.english[place])
            for exchanged in np.flatnonzero(rng.random(len(words)) < _EXCHANGED):
                words[exchanged] = self.words[rng.integers(len(self.words))]
            found.append(" ".join(words))
        return f"{' '.join(found)} No. {number}."

    def asked(self, count: int) -> list[str]:
        """Real questions, English ones and Chinese ones in turns, the same for each call."""
        rng = np.random.default_rng(7)
        pools = [pool for pool in self.questions if pool]
        return [pools[n % len(pools)][rng.integers(len(pools[n % len(pools)]))]
                for n in range(count)]  # fmt: skip


def _strings(path: Path) -> Iterator[tuple[str, str]]:
    """Texts of a file with the name of the field that each stands in."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".txt":
        yield "", text
        return
    try:
        values = [json.loads(text)]
    except ValueError:
        values = [json.loads(line) for line in text.splitlines() if line.strip()]
    for value in values:
        yield from _within("", value)


def _within(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, list):
        for one in value:
            yield from _within(name, one)
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _within(key, one)


DIM = 64  # of vectors
CHUNKS = 10  # of a document
BATCH = 128  # documents of one commit
QUESTIONS = 200
MODES: tuple[SearchMode, ...] = ("bm25", "vector", "hybrid")
FILTERS: dict[str, dict[str, Any]] = {
    "a year of 30": {"year": 2003},
    "half": {"year": {"$gte": 2005}},
}

Point = dict[str, Any]


def main() -> int:
    """Grow, measure, print and write; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", required=True, metavar="DIR", help="files of real text")
    parser.add_argument("--folder", required=True, metavar="DIR", help="of the knowledge base")
    parser.add_argument("--sizes", default="10000,60000", metavar="N,N", help="(10000,60000)")
    parser.add_argument("--kv", type=int, default=0, metavar="N", help="chunks with KV (0)")
    parser.add_argument("--minutes", type=float, default=90, metavar="M", help="(90)")
    parser.add_argument("--questions", action="store_true", help="ask instead, as said above")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", metavar="FILE", help="also write the JSON result there")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    return run_command(ask if args.questions else measure if args.measure else grow, args)


def embed(texts: Sequence[str]) -> HostArray:
    """Vectors of texts, float32 [N, DIM] of length 1: the mean of what each word has."""
    made = np.zeros((len(texts), DIM), np.float32)
    for row, text in enumerate(texts):
        places = [zlib.crc32(term.encode()) % len(WORDS) for term in set(terms(text))]
        made[row] = WORDS[places].sum(0) if places else WORDS[0]
    made /= np.linalg.norm(made, axis=1, keepdims=True)
    return made


WORDS = np.random.default_rng(3).normal(size=(1 << 16, DIM)).astype(np.float32)


def one_layer(texts: Texts) -> Model:
    """A random model with a tokenizer of these texts."""
    made = byte_level.train([texts.chunk(n) for n in range(300)], 4096)
    tokenizer = Tokenizer(made.to_str().encode(), {}, {})
    config = llama(
        vocab_size=tokenizer.vocab_size, num_layers=1, model_dim=32, mlp_dim=64, num_heads=4,
        num_kv_heads=2, head_dim=8, max_positions=2048, tie_embeddings=False, bos_id=None,
        eos_ids=(),
    )  # fmt: skip
    return random_model(config, tokenizer=tokenizer)


def opened(args: argparse.Namespace, texts: Texts) -> KnowledgeBase:
    """The knowledge base, made where it is missing."""
    return KnowledgeBase.open(
        Path(args.folder) / "kb", one_layer(texts), template="plain", chunk_tokens=128,
        overlap=0, encoders=["isolated"], embedder=embed,
    )  # fmt: skip


def document(texts: Texts, number: int) -> Document:
    """The document with chunks ``number`` and following."""
    text = "\n\n".join(texts.chunk(n) for n in range(number, number + CHUNKS))
    return Document(f"d{number:08}", text, metadata={"year": 1990 + number // CHUNKS % 30})


def put_without_kv(kb: KnowledgeBase, texts: Texts, first: int, last: int) -> None:
    """Documents of chunks ``first`` to ``last``: rows, words and vectors."""
    numbers = range(first, last, CHUNKS)
    put_parts(kb, [(document(texts, number), number) for number in numbers])


def put_parts(kb: KnowledgeBase, made: Sequence[tuple[Document, int]]) -> list[int]:
    """Documents whose chunks are their paragraphs: rows, words and vectors; no KV.

    The number of a document's first chunk stands for its tokens. Returns the chunk ids that left.
    """
    catalog = kb._catalog
    entries, searched = [], []
    for one, number in made:
        chunks, place = [], 0
        for index, text in enumerate(one.text.split("\n\n")):
            ids = np.arange(number + index, number + index + 100, dtype=np.int32)
            chunks.append(Chunk(index, place, place + len(text), ids, text))
            searched.append(searched_text("", text))
            place += len(text) + 2
        names = [f"{number + index:032x}{zlib.crc32(chunk.text.encode()):08x}"
                 for index, chunk in enumerate(chunks)]  # fmt: skip
        entries.append(
            NewDocument(
                document=one, digest=f"{zlib.crc32(one.text.encode()):x}", chunks=chunks,
                keys={"isolated": names}, content_ids=names,
                chunk_ids=catalog.reserve(len(chunks)),
            )
        )  # fmt: skip
    assert kb._vectors is not None
    kb._vectors.add([i for entry in entries for i in entry.chunk_ids], searched)
    left = catalog.put(entries)
    kb._vectors.remove(left)
    catalog.settle(left)
    return left


def grow(args: argparse.Namespace) -> int:
    """Add chunks up to every size, and have it measured."""
    require_folder(args.out)
    began = time.monotonic()
    texts = Texts(Path(args.texts))
    folder = Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    points = read_points(folder)
    for size in map(int, args.sizes.split(",")):
        if any(point["chunks"] >= size for point in points):
            continue
        if not fill(args, texts, size, began):
            print(f"stopped after {args.minutes} minutes; the same command goes on", flush=True)
            return 0
        command = [*sys.argv, "--measure"]
        done = subprocess.run(
            [sys.executable, *command], stdout=subprocess.PIPE, text=True, check=True
        )
        points = [*read_points(folder), json.loads(done.stdout.splitlines()[-1])]
        (folder / "points.json").write_text(json.dumps(points, indent=1))
        print(json.dumps(points[-1]), flush=True)
    result = {
        "benchmark": "scale",
        "kv_chunks": args.kv,
        "points": points,
        "slopes": slopes(points),
        "machine": describe(),
    }
    give_out(args, result, [json.dumps(result, indent=1)])
    return 0


def read_points(folder: Path) -> list[Point]:
    """What was measured so far."""
    path = folder / "points.json"
    return json.loads(path.read_text()) if path.is_file() else []


def fill(args: argparse.Namespace, texts: Texts, size: int, began: float) -> bool:
    """Add documents up to a size; False where the time is over."""
    rates = Path(args.folder) / "rates.jsonl"
    with opened(args, texts) as kb:
        counts = kb.counts()
        while counts["chunks"] < size:
            if time.monotonic() - began > 60 * args.minutes:
                return False
            start = time.perf_counter()
            first = CHUNKS * counts["documents"]
            with_kv = counts["chunks"] < args.kv
            if with_kv:
                kb.add([document(texts, first + CHUNKS * n) for n in range(BATCH)])
            else:
                missing = -(-(size - counts["chunks"]) // CHUNKS) * CHUNKS
                put_without_kv(kb, texts, first, first + min(missing, BATCH * CHUNKS))
            taken = time.perf_counter() - start
            before, counts = counts["chunks"], kb.counts()
            rate = {"chunks": counts["chunks"], "added": counts["chunks"] - before, "kv": with_kv,
                    "seconds": taken}  # fmt: skip
            with open(rates, "a") as file:
                file.write(json.dumps(rate) + "\n")
    return True


def measure(args: argparse.Namespace) -> int:
    """Measure the knowledge base as it is and print one line."""
    texts = Texts(Path(args.texts))
    asked = texts.asked(QUESTIONS * len(MODES))  # others for each mode: words are remembered
    found: Point = {}
    model_free = resident()
    start = time.perf_counter()
    kb = opened(args, texts)
    found["open_s"] = time.perf_counter() - start
    with kb:
        counts = kb.counts()
        found = {"chunks": counts["chunks"], "documents": counts["documents"], **found}
        found["first_search_s"] = seconds(lambda: kb.search(asked[0], 5))
        for first, mode in enumerate(MODES):
            own = asked[first * QUESTIONS :][:QUESTIONS]
            found[f"{mode}_ms"] = times(partial(kb.search, k=5, mode=mode), own)
        for name, where in FILTERS.items():
            found[f"hybrid, {name}, first_s"] = seconds(
                partial(kb.search, asked[0], 5, where=where)
            )
            found[f"hybrid, {name}, ms"] = times(partial(kb.search, k=5, where=where), asked[:50])
        found["resident_mb"] = round(resident() - model_free, 1)
        found["stats_s"] = seconds(kb.stats)
        found["list_s"] = seconds(kb.documents)
        adds, removes, after = [], [], []
        for number in range(10):
            one = document(texts, 10**8 + CHUNKS * number)
            adds.append(seconds(partial(kb.add, [one])))
            after.append(seconds(partial(kb.search, asked[number], 5)))
        for number in range(10):
            name = f"d{10**8 + CHUNKS * number:08}"
            removes.append(seconds(partial(kb.remove, [name])))
        found["add_one_s"] = round(statistics.median(adds), 4)
        found["search_after_add_ms"] = round(1000 * statistics.median(after), 2)
        found["remove_one_s"] = round(statistics.median(removes), 4)
        found["gc_s"] = seconds(lambda: kb.gc(grace_seconds=0))
    lines = (Path(args.folder) / "rates.jsonl").read_text().splitlines()
    rates = [json.loads(line) for line in lines]
    last = [rate for rate in rates if rate["chunks"] <= found["chunks"]][-10:]
    found["added_per_s"] = round(sum(r["added"] for r in last) / sum(r["seconds"] for r in last), 1)
    folder = Path(args.folder) / "kb"
    found["catalog_mb"] = round((folder / "catalog.sqlite").stat().st_size / 1e6, 1)
    found["vectors_mb"] = round(
        sum(path.stat().st_size for path in (folder / "vectors").rglob("*") if path.is_file())
        / 1e6,
        1,
    )
    found["commit"] = describe()["commit"]  # a base that takes hours may outlive some
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()}))
    return 0


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def times(ask: Callable[[str], object], questions: Sequence[str]) -> dict[str, float]:
    """Milliseconds of questions, each asked once: median, 95th percentile, and of the processor."""
    used = time.process_time()
    taken = sorted(1000 * seconds(partial(ask, question)) for question in questions)
    used = 1000 * (time.process_time() - used) / len(taken)
    return {
        "p50": round(statistics.median(taken), 2),
        "p95": round(taken[-1 - len(taken) // 20], 2),
        "processor_mean": round(used, 2),
    }


def resident() -> float:
    """Memory of this process, in MB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def slopes(points: Sequence[Point]) -> dict[str, float]:
    """Of every time the slope over the number of chunks, both as logarithms: 1 is in proportion."""
    if len(points) < 2:
        return {}
    sizes = np.log([point["chunks"] for point in points])
    found = {}
    for name, value in points[-1].items():
        rows = [point[name]["p95"] if isinstance(value, dict) else point[name] for point in points]
        if name not in ("chunks", "documents") and all(isinstance(it, int | float) for it in rows):
            found[name] = round(float(np.polyfit(sizes, np.log(np.maximum(rows, 1e-9)), 1)[0]), 2)
    return found


ASKED = 60  # questions of each set
K = 10
CANDIDATES = 50  # of each ranking that is fused, as the hybrid search has them
FIRST = 2 * 10**9  # number of the first passage
PASSAGES = 1000  # of one commit


def ask(args: argparse.Namespace) -> int:
    """Add the passages, then ask."""
    require_folder(args.out)
    data = Path(args.texts)
    questions, passages = sets(data)
    with opened(args, Texts(data)) as kb:
        there = kb._catalog.document("passage 0") is not None  # of an earlier run
        for some in batched([] if there else enumerate(passages), PASSAGES):
            put_parts(kb, [(Document(f"passage {n}", text), FIRST + n) for n, text in some])
        result = {
            "benchmark": "scale_questions",
            "chunks": kb.counts()["chunks"],
            "sets": {name: asked(kb, own) for name, own in questions.items()},
            "machine": describe(),
        }
    give_out(args, result, [json.dumps(result, indent=1, ensure_ascii=False)])
    return 0


def sets(data: Path) -> tuple[dict[str, list[str]], list[str]]:
    """The questions of each set, and the passages of both, each once."""
    hotpot = json.loads((data / "hippo-multihop" / "hotpotqa_train.json").read_text())
    rgb = [json.loads(it) for it in (data / "rgb" / "zh_refine.json").read_text().splitlines()]
    passages = [" ".join(text) for it in hotpot for _, text in it["context"]]
    passages += [text for it in rgb for text in (*it["positive"], *it["negative"])]
    questions = {
        "HotpotQA": [it["question"] for it in hotpot[:ASKED]],
        "RGB zh": [it["query"] for it in rgb[:ASKED]],
    }
    one_line = (" ".join(text.split()) for text in passages)
    return questions, list(dict.fromkeys(text for text in one_line if text))


def asked(kb: KnowledgeBase, questions: Sequence[str]) -> dict[str, Any]:
    """For each way to search the recall, and the questions whose hits differ."""
    assert kb._vectors is not None
    words = kb._catalog.words()
    exact = VectorIndex.open(kb.path / "vectors", embed([""]).shape[1], "exact", mode="r")

    def by_vectors(question: str, k: int) -> list[Found]:
        ids, scores = exact.search(embed([question]), k)
        return [Found(*it) for it in zip(ids[0].tolist(), scores[0].tolist(), strict=True)]

    def by_both(question: str, k: int) -> list[Found]:
        rankings = words(question, CANDIDATES), by_vectors(question, CANDIDATES)
        return fuse(rankings, k)

    ways: dict[SearchMode, Callable[[str, int], list[Found]]] = {
        "bm25": words,
        "vector": by_vectors,
        "hybrid": by_both,
    }
    found: dict[str, Any] = {"questions": len(questions)}
    for mode, all_of_it in ways.items():
        hits = wanted = 0
        differ = []
        for question in questions:
            expected = [it.chunk_id for it in all_of_it(question, K)]
            got = [hit.chunk_id for hit in kb.search(question, K, mode=mode)]
            hits, wanted = hits + len(set(got) & set(expected)), wanted + len(expected)
            if got != expected:
                differ.append({"question": question, "missed": sorted({*expected} - {*got}),
                               "instead": sorted({*got} - {*expected})})  # fmt: skip
        found[mode] = {"recall": round(hits / wanted, 5), "differ": differ}
    return found


if __name__ == "__main__":
    sys.exit(main())
