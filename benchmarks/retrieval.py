"""Recall of gold passages: by words (BM25), by vectors, and by both (reciprocal rank fusion).

Every passage of a set becomes a document of a fresh catalog, cut into chunks as ingestion cuts
them, and every question is put to the retrievers that a knowledge base uses. No KV is computed. The
recall at k of a question is the share of its gold passages among the first k chunks.

Sets are looked for below the data folder, in the files of their authors; one without files is left
out. HotpotQA and MuSiQue: ``hotpotqa_train.json`` and ``musique_train.json``, each with its
``*_corpus.json``; a question's gold passages are those of its supporting facts. RGB:
``zh_refine.json`` and ``en_fact.json``; a question's gold passages are its positives, among all
positives and negatives.

Without ``--embedder`` the vectors are latent semantic analysis of the passages themselves
("lsa-256": TF-IDF and a truncated singular value decomposition), which is no trained encoder.

example: python benchmarks/retrieval.py --data DIR --embedder MODEL_DIR --out results.json
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from jaxrag.cli import run_command
from jaxrag.cli.options import add_json
from jaxrag.cli.output import give_out, require_folder
from jaxrag.library.catalog import Catalog, NewDocument
from jaxrag.library.documents import Document
from jaxrag.library.documents.chunking import Chunking, split
from jaxrag.library.embed import load_embedder
from jaxrag.library.retrieve.base import Found, Retriever, Vectors, searched_text
from jaxrag.library.retrieve.lance import KINDS, VectorIndex
from jaxrag.library.retrieve.retrievers import BM25Retriever, HybridRetriever, VectorRetriever
from jaxrag.library.retrieve.terms import terms
from jaxrag.measure.machine import describe
from jaxrag.models.text import byte_level
from jaxrag.models.text.tokenizer import Tokenizer

CUTOFFS = (5, 10)
CHUNK_TOKENS = 512
LSA_DIM = 256

Embed = Callable[[Sequence[str], str], Vectors]


@dataclasses.dataclass(frozen=True)
class Question:
    """A question and the ids of the passages that answer it."""

    text: str
    gold: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Set:
    """Passages, and questions about them."""

    name: str
    passages: Sequence[Document]
    questions: Sequence[Question]


def read_hotpotqa(questions: Path, corpus: Path) -> Set:
    """HotpotQA: a corpus of title -> sentences; gold are the titles of the supporting facts."""
    passages = [
        Document(f"p{number}", "".join(sentences), title)
        for number, (title, sentences) in enumerate(json.loads(corpus.read_text("utf-8")).items())
    ]
    ids = {passage.title: passage.id for passage in passages}
    return Set(
        "HotpotQA",
        passages,
        [
            Question(row["question"], frozenset(ids[title] for title, _ in row["supporting_facts"]))
            for row in json.loads(questions.read_text("utf-8"))
        ],
    )


def read_musique(questions: Path, corpus: Path) -> Set:
    """MuSiQue: a corpus of {title, text}; gold are the supporting paragraphs."""
    passages = [
        Document(f"p{number}", row["text"], row["title"])
        for number, row in enumerate(json.loads(corpus.read_text("utf-8")))
    ]
    ids = {(passage.title, passage.text): passage.id for passage in passages}
    return Set(
        "MuSiQue",
        passages,
        [
            Question(
                row["question"],
                frozenset(
                    ids[paragraph["title"], paragraph["paragraph_text"]]
                    for paragraph in row["paragraphs"]
                    if paragraph["is_supporting"]
                ),
            )
            for row in json.loads(questions.read_text("utf-8"))
        ],
    )


def read_rgb(name: str, path: Path) -> Set:
    """RGB: JSON lines; gold are a question's positives, among everybody's passages."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    texts = dict.fromkeys(text for row in rows for text in (*row["positive"], *row["negative"]))
    passages = [Document(f"p{number}", text) for number, text in enumerate(texts)]
    ids = {passage.text: passage.id for passage in passages}
    return Set(
        name,
        passages,
        [Question(row["query"], frozenset(ids[t] for t in row["positive"])) for row in rows],
    )


def read_sets(data: Path) -> list[Set]:
    """The sets whose files lie anywhere below a folder."""
    files = {path.name: path for path in sorted(data.rglob("*.json"))}
    readers: list[tuple[Callable[..., Set], tuple[str, ...]]] = [
        (read_hotpotqa, ("hotpotqa_train.json", "hotpotqa_train_corpus.json")),
        (read_musique, ("musique_train.json", "musique_train_corpus.json")),
        (lambda path: read_rgb("RGB en_fact", path), ("en_fact.json",)),
        (lambda path: read_rgb("RGB zh_refine", path), ("zh_refine.json",)),
    ]
    return [
        read(*(files[name] for name in names))
        for read, names in readers
        if all(name in files for name in names)
    ]


def lsa(texts: Sequence[str]) -> Embed:
    """Latent semantic analysis fitted on texts: unit vectors of ``LSA_DIM`` values at most."""
    vocabulary: dict[str, int] = {}
    holders: collections.Counter[int] = collections.Counter()

    def counts(text: str) -> dict[int, int]:
        found = collections.Counter(terms(text))
        return {vocabulary[term]: n for term, n in found.items() if term in vocabulary}

    for text in texts:
        for term in terms(text):
            vocabulary.setdefault(term, len(vocabulary))
        holders.update(counts(text).keys())
    idf = np.array([math.log(len(texts) / holders[i]) + 1 for i in range(len(vocabulary))])

    def weigh(rows: Sequence[str]) -> scipy.sparse.csr_matrix:
        data, columns, starts = [], [], [0]
        for row in rows:
            for term, n in counts(row).items():
                columns.append(term)
                data.append((1 + math.log(n)) * idf[term])
            starts.append(len(columns))
        matrix = scipy.sparse.csr_matrix((data, columns, starts), (len(rows), len(vocabulary)))
        norm = np.sqrt(np.asarray(matrix.multiply(matrix).sum(axis=1)).ravel())
        return scipy.sparse.diags(1 / np.maximum(norm, 1e-12)) @ matrix

    passages = weigh(texts)
    directions = _right_singular_vectors(passages, min(LSA_DIM, min(passages.shape)))

    def embed(rows: Sequence[str], kind: str) -> Vectors:
        made = weigh(rows) @ directions.T
        return (made / np.maximum(np.linalg.norm(made, axis=1, keepdims=True), 1e-12)).astype("f4")

    return embed


def _right_singular_vectors(matrix: scipy.sparse.csr_matrix, count: int) -> Vectors:
    """The first ``count``, or fewer: as many as the rank.

    By randomized subspace iteration (Halko et al. 2011, algorithm 4.4).
    """
    block = np.random.default_rng(0).standard_normal((matrix.shape[0], count + 16))
    for _ in range(5):
        block, _ = np.linalg.qr(matrix @ (matrix.T @ block))
    projected = matrix.T @ block
    squares, rotation = np.linalg.eigh(projected.T @ projected)  # ascending
    order = [i for i in reversed(range(len(squares))) if squares[i] > 1e-9 * squares[-1]][:count]
    made: Vectors = (projected @ rotation[:, order] / np.sqrt(squares[order])).T
    return made


def train_tokenizer(texts: Sequence[str], folder: Path) -> Tokenizer:
    """A byte-level BPE tokenizer of 8,192 tokens for these texts."""
    byte_level.save(byte_level.train(texts, 8192), folder)
    return Tokenizer.load(folder)


def fill(catalog: Catalog, passages: Sequence[Document], tokenizer: Tokenizer) -> None:
    """Commit every passage as a document with its chunks."""
    chunking = Chunking(CHUNK_TOKENS, overlap=0)
    cut = [split(passage.text, tokenizer, chunking) for passage in passages]
    free = iter(catalog.reserve(sum(map(len, cut))))
    catalog.put(
        [
            NewDocument(
                document=passage,
                digest="",
                chunks=chunks,
                keys={},
                content_ids=[""] * len(chunks),
                chunk_ids=[next(free) for _ in chunks],
            )
            for passage, chunks in zip(passages, cut, strict=True)
        ]
    )


def measure(
    retriever: Retriever, questions: Sequence[Question], documents: dict[int, str]
) -> dict[str, Any]:
    """Recall at every cutoff with its standard error, and milliseconds per question."""
    texts = [question.text for question in questions]
    retriever.search(texts[:1], max(CUTOFFS))  # compiles
    start = time.perf_counter()
    rankings: list[list[Found]] = []
    for text in texts:
        rankings += retriever.search([text], max(CUTOFFS))
    seconds = time.perf_counter() - start
    result: dict[str, Any] = {}
    for k in CUTOFFS:
        shares = np.array(
            [
                len(question.gold & {documents[item.chunk_id] for item in ranking[:k]})
                / len(question.gold)
                for question, ranking in zip(questions, rankings, strict=True)
            ]
        )
        result[f"recall@{k}"] = round(float(shares.mean()), 4)
        result[f"error@{k}"] = round(float(shares.std(ddof=1) / math.sqrt(len(shares))), 4)
    result["milliseconds"] = round(1000 * seconds / len(texts), 2)
    return result


@dataclasses.dataclass(frozen=True)
class Indexed:
    """A set in a fresh catalog, with the retrievers of a knowledge base over it.

    Attributes:
      documents: by chunk id the passage that it is of.
      texts: by chunk id what is searched of it.
      by_vector: the vectors' retriever, called ``embedder``.
    """

    documents: dict[int, str]
    texts: dict[int, str]
    by_words: Retriever
    by_vector: Retriever
    embedder: str


@contextlib.contextmanager
def indexed(data: Set, embedder: Path | None, index: str) -> Iterator[Indexed]:
    """Cut and index the passages of a set, until the block ends."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        tokenizer = train_tokenizer([passage.text for passage in data.passages], work)
        catalog = Catalog.create(work / "catalog.sqlite", {})
        fill(catalog, data.passages, tokenizer)
        documents: dict[int, str] = {}
        passages: dict[int, str] = {}
        for passage in data.passages:
            chunk_ids = catalog.ids_of_document(passage.id)
            for chunk_id, text in catalog.texts(chunk_ids).items():
                documents[chunk_id] = passage.id
                passages[chunk_id] = searched_text(passage.title, text)
        embed: Any
        if embedder is None:
            embed, name = lsa(list(passages.values())), f"lsa-{LSA_DIM}"
        else:
            embed, name = load_embedder(embedder), embedder.name
        dim = embed(["dimension"], "query").shape[1]
        vectors = VectorIndex.open(work / "vectors", dim, index)
        by_vector = VectorRetriever(embed, vectors, catalog.chunk_ids)
        vectors.add(np.array(list(passages), np.int64), embed(list(passages.values()), "passage"))
        yield Indexed(documents, passages, BM25Retriever(catalog.search), by_vector, name)
        vectors.close()
        catalog.close()


def run_set(data: Set, embedder: Path | None, index: str) -> list[dict[str, Any]]:
    """One row per retriever."""
    with indexed(data, embedder, index) as found:
        return _rows(data, found)


def _rows(data: Set, found: Indexed) -> list[dict[str, Any]]:
    name, by_words, by_vector = found.embedder, found.by_words, found.by_vector
    return [
        {
            "set": data.name,
            "passages": len(data.passages),
            "questions": len(data.questions),
            "gold_per_question": round(
                float(np.mean([len(question.gold) for question in data.questions])), 2
            ),
            "retriever": label,
            **measure(retriever, data.questions, found.documents),
            **{
                f"ceiling@{k}": round(
                    float(np.mean([min(1, k / len(q.gold)) for q in data.questions])), 4
                )
                for k in CUTOFFS
            },
        }
        for label, retriever in (
            ("bm25", by_words),
            (name, by_vector),
            (f"bm25 + {name}", HybridRetriever([by_words, by_vector])),
        )
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    names = ["set", "passages", "questions", "retriever"]
    head = [*names, *(f"recall@{k} (at most)" for k in CUTOFFS), "ms / question"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        recalls = [
            f"{row[f'recall@{k}']:.3f} ± {row[f'error@{k}']:.3f} ({row[f'ceiling@{k}']:.2f})"
            for k in CUTOFFS
        ]
        lines.append([*(str(row[name]) for name in names), *recalls, f"{row['milliseconds']:.1f}"])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="where the sets lie"
    )
    parser.add_argument("--embedder", type=Path, metavar="DIR", help="an encoder; LSA without")
    parser.add_argument("--index", choices=KINDS, default="exact", help="of the vectors (exact)")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON result there")
    add_json(parser)
    return run_command(run, parser.parse_args())


def run(args: argparse.Namespace) -> int:
    """Print the table, or one JSON object; exit code 1 where there are no sets."""
    require_folder(args.out)
    sets = read_sets(args.data)
    if not sets:
        print(f"{args.data}: no set was found; see --help for the files", file=sys.stderr)
        return 1
    rows: list[dict[str, Any]] = []
    for data in sets:
        rows += run_set(data, args.embedder, args.index)
    report = table(rows)
    result = {
        "benchmark": "retrieval",
        "chunk_tokens": CHUNK_TOKENS,
        "index": args.index,
        "rows": rows,
        "report": report,
        "machine": describe(),
    }
    give_out(args, result, [report])
    return 0


if __name__ == "__main__":
    sys.exit(main())
