"""Searches by words: the index in the catalog beside LanceDB's full-text index.

Both index the same terms (library/retrieve/terms.py) of chunks mixed of real sentences, are asked
the same questions in turn, and are held against what a library must hold before it can take over:
the hits of scoring everything, one corpus reached by three histories, nothing left of a removed
text, a damaged file that is never believed.

example: python benchmarks/word_index.py --texts TEXTS --folder /tmp/words --chunks 19000
"""

import argparse
import json
import math
import shutil
import statistics
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import apsw
import numpy as np
from scale import Texts

from jaxrag.cli import run_command
from jaxrag.cli.output import give_out, require_folder
from jaxrag.library.retrieve.bm25 import BM25Index
from jaxrag.library.retrieve.joining import Joining
from jaxrag.library.retrieve.lance_rows import lancedb_and_arrow
from jaxrag.library.retrieve.packing import Packing
from jaxrag.library.retrieve.terms import terms
from jaxrag.measure.machine import describe

K, K1, B = 10, 1.2, 0.75
CANDIDATES = 50  # of LanceDB, which are scored again
AT_ONCE = 4096  # chunks of one change
Hits = list[tuple[int, float]]


class Ours:
    """The index in SQLite; its methods are those of ``Lance``."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.connection = apsw.Connection(str(folder / "catalog.sqlite"))
        for pragma in ("journal_mode=DELETE", "synchronous=FULL", "secure_delete=ON"):
            self.connection.execute(f"PRAGMA {pragma}").fetchall()
        self.index = BM25Index(self.connection)
        self.count = 0
        self.texts = dict[int, str]()

    def create(self) -> None:
        """Make it, empty."""
        with self.connection:
            self.index.create()

    def add(self, texts: Mapping[int, str]) -> None:
        """Index chunks by id."""
        with self.connection:
            self.index.add(texts, self.count)
        self.count += len(texts)
        self.texts |= texts

    def remove(self, texts: Mapping[int, str]) -> None:
        """Forget chunks, given their texts."""
        with self.connection:
            self.index.remove(texts)
        self.count -= len(texts)

    def settle(self) -> None:
        """Pack it and join blocks, as a knowledge base does beside its work; no change needs it."""
        packing, joining = Packing(self.index, self.count), Joining(self.index.packed)
        more = True
        while more:
            with self.connection:
                more = packing.step(lambda ids: {at: self.texts[at] for at in ids})
                more = more or joining.step()

    def search(self, question: str) -> Hits:
        """The best K of all chunks."""
        version = self.connection.total_changes()
        return [(at, score) for at, score in self.index.search(question, K, version=version)]

    raw = search

    def close(self) -> None:
        """Let go of the files."""
        self.connection.close()


class Lance:
    """LanceDB's index; its candidates are scored again by exact BM25 of the live rows."""

    def __init__(self, folder: Path) -> None:
        lancedb, self.arrow = lancedb_and_arrow()
        self.database = lancedb.connect(str(folder))
        self.lengths: dict[int, int] = {}
        self.holders: Counter[str] = Counter()
        self.table: Any = None
        if "words" in self.database.list_tables().tables:
            self.table = self.database.open_table("words")

    def create(self) -> None:
        """Make it, empty."""
        names = self.arrow.schema([("id", self.arrow.int64()), ("words", self.arrow.string())])
        self.table = self.database.create_table("words", schema=names)

    def add(self, texts: Mapping[int, str]) -> None:
        """Index chunks by id."""
        split = {at: terms(text) for at, text in texts.items()}
        for at, words in split.items():
            self.lengths[at] = len(words)
            self.holders.update(set(words))
        rows = {"id": list(split), "words": [" ".join(words) for words in split.values()]}
        self.table.add(self.arrow.table(rows))

    def remove(self, texts: Mapping[int, str]) -> None:
        """Forget chunks, given their texts."""
        for at, text in texts.items():
            del self.lengths[at]
            self.holders.subtract(set(terms(text)))
        self.table.delete(f"id IN ({', '.join(map(str, texts))})")

    def settle(self) -> None:
        """Bring it into the form that is searched."""
        if self.table.list_indices():
            self.table.optimize()
        else:
            with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
                self.table.create_fts_index(
                    "words", use_tantivy=False, base_tokenizer="whitespace", lower_case=False,
                    stem=False, remove_stop_words=False, ascii_folding=False,
                    max_token_length=None, with_position=False,
                )  # fmt: skip

    def candidates(self, question: str, count: int) -> list[dict[str, Any]]:
        """The first so many rows by its own scores."""
        asked = self.table.search(" ".join(dict.fromkeys(terms(question))), query_type="fts")
        found: list[dict[str, Any]] = asked.limit(count).to_list()
        return found

    def search(self, question: str) -> Hits:
        """The best K of all chunks."""
        rows = [(row["id"], row["words"].split()) for row in self.candidates(question, CANDIDATES)]
        return best(question, rows, self.holders, self.lengths)

    def raw(self, question: str) -> Hits:
        """As LanceDB scores."""
        return [(row["id"], row["_score"]) for row in self.candidates(question, K)]

    def close(self) -> None:
        """Let go of the files."""
        self.table = None


def best(
    question: str,
    rows: Sequence[tuple[int, Sequence[str]]],
    holders: Mapping[str, int],
    lengths: Mapping[int, int],
) -> Hits:
    """Those of some chunks that score best, as the index in the catalog scores them.

    Of their words those count that are asked for; ``lengths`` are of all.
    """
    mean, many = sum(lengths.values()) / len(lengths), len(lengths)
    asked = [it for it in dict.fromkeys(terms(question)) if holders.get(it)]
    telling = [it for it in asked if many < 10_000 or holders[it] <= many / 2] or asked
    found = []
    for at, words in rows:
        count = Counter(words)
        score = sum(
            math.log(1 + (many - holders[it] + 0.5) / (holders[it] + 0.5)) * count[it] * (K1 + 1)
            / (count[it] + K1 * (1 - B + B * lengths[at] / mean))
            for it in telling if count[it]
        )  # fmt: skip
        found += [(at, score)] * (score > 0)
    return sorted(found, key=lambda hit: (-round(hit[1], 6), hit[0]))[:K]


def everything(texts: Mapping[int, str], questions: Sequence[str]) -> list[Hits]:
    """The hits of scoring every chunk that shares a term with a question."""
    asked = {word for question in questions for word in terms(question)}
    lengths, split = dict[int, int](), dict[int, list[str]]()
    of: dict[str, list[int]] = defaultdict(list)
    for at, text in texts.items():
        words = terms(text)
        lengths[at], split[at] = len(words), [word for word in words if word in asked]
        for word in set(split[at]):
            of[word].append(at)
    holders = {word: len(held) for word, held in of.items()}
    found = []
    for question in questions:
        among = sorted({at for word in terms(question) for at in of.get(word, ())})
        found.append(best(question, [(at, split[at]) for at in among], holders, lengths))
    return found


def histories(
    arm: type[Ours] | type[Lance], folder: Path, texts: dict[int, str]
) -> Iterator[Ours | Lance]:
    """One corpus at once, in two parts, and with others added and removed between them."""
    keys = list(texts)
    half = [dict.fromkeys(keys[: len(keys) // 2]), dict.fromkeys(keys[len(keys) // 2 :])]
    first, second = ({at: texts[at] for at in part} for part in half)
    others = {at + 10_000_000: text for at, text in first.items()}
    plans: list[list[tuple[str, dict[int, str]]]] = [
        [("add", texts)],
        [("add", first), ("settle", {}), ("add", second)],
        [("add", first), ("add", others), ("settle", {}), ("remove", others), ("add", second)],
    ]
    for number, steps in enumerate(plans):
        index = arm(folder / f"{arm.__name__}-{number}")
        index.create()
        for name, given in steps:
            getattr(index, name)(*([given] if given else []))
        if number == 0:
            index.settle()
        yield index


def files(folder: Path) -> dict[Path, bytes]:
    """What is on the disk."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def believed(arm: type[Ours] | type[Lance], folder: Path, questions: Sequence[str]) -> int:
    """Of damaged index files those behind which other hits came without an error."""
    index = arm(folder)
    right = [index.raw(question) for question in questions]
    index.close()
    rng, wrong = np.random.default_rng(7), 0
    whole = {path: data for path, data in files(folder).items() if len(data) > 64}
    for path, data in whole.items():
        if arm is Lance and "_indices" not in path.parts:
            continue
        for _ in range(8):
            changed = bytearray(data)
            changed[rng.integers(len(data) // 8, len(data))] ^= 1 << int(rng.integers(8))
            path.write_bytes(changed)
            try:
                index = arm(folder)
                wrong += [index.raw(question) for question in questions] != right
                index.close()
            except Exception:  # whatever it is, the damage was seen
                pass
            path.write_bytes(data)
    return wrong


def measure(texts: Texts, folder: Path, chunks: int, asked: int, small: int) -> dict[str, Any]:
    """All numbers of both."""
    all_texts = {n + 1: texts.chunk(n) for n in range(chunks)}
    questions = texts.asked(asked)
    wanted = everything(all_texts, questions)
    found: dict[str, Any] = {"chunks": chunks, "questions": asked}
    arms: dict[str, Ours | Lance] = {}
    for kind in (Ours, Lance):
        name, place = kind.__name__.lower(), folder / kind.__name__
        start = time.perf_counter()
        arms[name] = index = kind(place)
        index.create()
        for at in range(1, chunks + 1, AT_ONCE):
            index.add({n: all_texts[n] for n in range(at, min(at + AT_ONCE, chunks + 1))})
        index.settle()
        found[name] = {"build_seconds": time.perf_counter() - start}
        found[name]["bytes"] = sum(map(len, files(place).values()))
    hits: dict[str, list[Hits]] = {name: [] for name in arms}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(2):  # the first warms up
        for question in questions:
            for name, index in arms.items():
                start = time.perf_counter()
                got = index.search(question)
                if turn:
                    times[name].append(time.perf_counter() - start)
                    hits[name].append(got)
    for name, each in times.items():
        same = [len({at for at, _ in a} & {at for at, _ in b}) / max(len(b), 1)
                for a, b in zip(hits[name], wanted, strict=True)]  # fmt: skip
        first = [
            bool(a) and a[0][0] == b[0][0] for a, b in zip(hits[name], wanted, strict=True) if b
        ]
        found[name] |= {
            "p50_ms": 1000 * statistics.median(each),
            "p95_ms": 1000 * statistics.quantiles(each, n=20)[-1],
            "overlap_at_10": statistics.fmean(same), "same_first": statistics.fmean(first),
        }  # fmt: skip
    few = {at: all_texts[at] for at in range(1, small + 1)}
    for kind in (Ours, Lance):
        name, place = kind.__name__.lower(), folder / "small"
        asked_of: list[list[Hits]] = []
        for index in histories(kind, place, few):
            asked_of.append([index.raw(question) for question in questions[:50]])
            index.close()
        found[name]["histories_alike"] = asked_of[0] == asked_of[1] == asked_of[2]
        removing = place / "removed" / kind.__name__
        index = kind(removing)
        index.create()
        index.add(few)
        index.settle()
        before, gone = files(removing), {10_000_001: few[1]}
        index.add(gone)
        written = {path: data for path, data in files(removing).items() if before.get(path) != data}
        index.remove(gone)
        left = files(removing)
        found[name]["files_of_a_removed_text"] = sum(
            left.get(path) == data for path, data in written.items()
        )
        index.close()
        damaged = place / f"{kind.__name__}-0"
        found[name]["damage_believed"] = believed(kind, damaged, questions[:5])
        start = time.perf_counter()
        index = kind(folder / kind.__name__)
        index.raw(questions[0])
        found[name]["open_seconds"] = time.perf_counter() - start
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--texts", type=Path, required=True, help="folder of JSON and text files")
    parser.add_argument("--folder", type=Path, required=True, help="of both; emptied before")
    parser.add_argument("--chunks", type=int, default=19_000)
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--small", type=int, default=2_000, help="chunks of the histories")
    parser.add_argument("--out", help="also write the JSON result there")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return run_command(run, parser.parse_args(argv))


def run(args: argparse.Namespace) -> int:
    """What the command does."""
    require_folder(args.out)
    shutil.rmtree(args.folder, ignore_errors=True)
    found = measure(Texts(args.texts), args.folder, args.chunks, args.questions, args.small)
    result = {"benchmark": "word_index", **found, "machine": describe()}
    give_out(args, result, [json.dumps(result, indent=1)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
