"""Which texts serve as primers: kinds, lengths and places of what chunks are encoded behind.

Prompts of NQ-open as `jaxrag eval near` asks them. Full attention answers each once; then the
chunks are encoded behind text after text, and KL and agreement to full attention are measured over
that answer. One factor at a time: the kind of text; its length, of whole passages and cut; its
place, behind or before the instructions; chunk tokens, for which neighbouring passages of the file
are joined and cut; and passages. What primers hold of the file is in no measured prompt.

Kinds: ``encyclopaedia``, whole passages; ``bare``, the same without the chunk template;
``dialogue``, of primer_dialogues.toml; ``code``, of this repository; ``questions``; the prompt's
``prefix`` once more, and repeated; ``itself``, each chunk behind a copy of itself; and what is
shipped. Prompts take the texts of a kind in turn, and in a further round each takes the next.

Finished measurements are kept as lines beside --out, and not made again.

example: python benchmarks/primer_study.py --model MODEL --data nq-open-oracle.jsonl --out FILE
"""

import dataclasses
import functools
import itertools
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from script import More, Result, run_script

from jaxrag.base.errors import RequestError
from jaxrag.base.options import option, parse_counts
from jaxrag.base.types import HostArray
from jaxrag.measure.evals.asked import ITEMS
from jaxrag.measure.evals.datasets.near import NearStudy, passages_of
from jaxrag.measure.evals.datasets.options import NearOptions
from jaxrag.measure.evals.datasets.run import items_of
from jaxrag.measure.evals.gate import answered, forced_along, kl_divergence
from jaxrag.measure.evals.statistics import bootstrapped
from jaxrag.measure.machine import describe
from jaxrag.measure.subject import described
from jaxrag.models.model import load_model
from jaxrag.models.text.progress import progress_bar
from jaxrag.reuse.encode import ChunkEncoding, ChunkInContext, primer_named
from jaxrag.serve.answer_files import AnswerFile
from jaxrag.serve.conversation import Passage
from jaxrag.serve.questions import ReadyQuestion, prepare

HERE = Path(__file__).parent
ALONE, MAIN = "none", "encyclopaedia"  # the rows that others are compared with
SEVERAL = (MAIN, "bare", "dialogue", "code", "questions")  # kinds of several texts
SHIPPED = ("bakery", "lamps", "tides")
SINGLE = (ALONE, *SHIPPED, "prefix", "prefix repeated", "itself")
TOKENS = 256  # of a text, about
PASSAGE = 128  # tokens of one of the file, about
PASSAGES = 20  # of the file, that one text may hold; as many questions have about TOKENS
SEED = 7  # of what is drawn, and of resampling
many = functools.partial(option, metavar="N,...", parse=parse_counts)


@dataclasses.dataclass(frozen=True)
class PrimerOptions:
    """What is measured."""

    model: str = option(dataclasses.MISSING, "a directory or a GGUF file", "MODEL")
    data: str = option(dataclasses.MISSING, "NQ-open's oracle file", "FILE")
    number: int = option(24, "first questions of the file, for kinds of text", "N", flag="--num")
    others: int = option(12, "for all else, at most as many", "N")
    passages: int = option(5, "to a question", "N")
    counts: tuple[int, ...] = many((3, 10, 20), "other such numbers")
    sizes: tuple[int, ...] = many((64, 128, 256, 512), "tokens of joined passages")
    lengths: tuple[int, ...] = many((16, 64, 128, 256, 512, 1024), "tokens of texts")
    texts: int = option(8, "of a kind", "N")
    template: str = option("chat", "of the prompt", "NAME")
    finished_only: bool = option(False, "measure no more, and report what is kept")
    out: str | None = None  # the file of the result


OUT = More(fields=lambda args: {"out": args.out})


class Prompts(NamedTuple):
    """So many passages, as they are, or joined and cut to so many tokens."""

    passages: int
    tokens: int | None = None


class Cell(NamedTuple):
    """A prompt, by number, and what its chunks are encoded behind: kind, and number of the text."""

    prompts: Prompts
    at: int
    primer: str
    text: int


def plan(o: PrimerOptions) -> Iterator[Cell]:
    """All measurements, the first things first."""
    main = Prompts(o.passages)
    forms = [*map(Prompts, o.counts), *(Prompts(o.passages, it) for it in o.sizes)]
    forms.sort(key=lambda it: it.passages * (it.tokens or TOKENS / 2))  # the short ones first
    whole = [f"whole {n}" for n in o.lengths if n >= PASSAGE and n != TOKENS]
    lengths = [*(f"cut {n}" for n in o.lengths), *whole, "before"]
    blocks: list[tuple[Prompts, int, int, Sequence[str]]] = [
        (main, o.number, 0, (*SINGLE, *SEVERAL)),
        (main, o.others, 0, lengths),
        *((it, o.others, 0, (ALONE, MAIN)) for it in forms),
        *((main, o.number, turn, SEVERAL) for turn in range(1, o.texts)),
    ]
    for prompts, number, turn, primers in blocks:
        for at, primer in itertools.product(range(number), primers):
            yield Cell(prompts, at, primer, 0 if primer in SINGLE else (at + turn) % o.texts)


Asked = tuple[ReadyQuestion, list[int], HostArray]


class Study:
    """The model, the prompts by how many passages they have, and the texts by kind."""

    def __init__(self, o: PrimerOptions) -> None:
        primed: dict[str, Any] = {"methods": ("primed",), "template": o.template, "seed": SEED}
        near = NearOptions("nq_open", (o.data,), model=o.model, **primed)
        self.near = NearStudy.open(near, load_model(o.model, dtype="float32"))
        self.template, self.tokenizer = self.near.full.template, self.near.model.text_tokenizer()
        self.encode = self.tokenizer.encode
        counts = {1, o.passages, *o.counts}
        self.items = {n: items_of(dataclasses.replace(near, documents=n)) for n in counts}
        self.file = [it.documents[0][1] for it in self.items[1]]
        first = [it for n in counts - {1} for it in self.items[n][: max(o.number, o.others)]]
        used = {text for it in first for _, text in it.documents}
        for it in self.items[o.passages][: o.others if o.sizes else 0]:
            used.update(*(self.joined(text, max(o.sizes)) for _, text in it.documents))
        free = {it[1]: (*it, item.question) for item in self.items[1] for it in item.documents}
        far = [it for it in list(free.values())[len(free) // 2 :] if it[1] not in used]
        if len(far) < PASSAGES * o.texts:
            raise RequestError(f"--texts {o.texts}: {o.data} has enough for {len(far) // PASSAGES}")
        drawn = random.Random(SEED).sample(far, PASSAGES * o.texts)
        self.texts = self._texts(o, [*itertools.batched(drawn, PASSAGES)])
        self._asked: dict[tuple[Prompts, int], Asked] = {}

    def _texts(self, o: PrimerOptions, drawn: list[tuple[Any, ...]]) -> dict[str, list[HostArray]]:
        """Token ids [R] int32 of every text by its kind."""

        def chunk(title: str, text: str, most: int | None = None) -> HostArray:
            return self.template.chunk_ids(self.tokenizer, self.encode(text)[:most], title)

        parts = [[chunk(title, text) for title, text, _ in its] for its in drawn]

        def whole(tokens: int) -> list[HostArray]:
            return [np.concatenate(its[: tokens // PASSAGE]) for its in parts]

        files = {it: it.read_text("utf-8") for it in sorted(HERE.parent.glob("jaxrag/**/*.py"))}
        long = [(it.name, text) for it, text in files.items() if len(text) > 8 * TOKENS]
        told = primer_named(str(HERE / "primer_dialogues.toml")).passages[: o.texts]
        bare = [its[: TOKENS // PASSAGE] for its in drawn]
        prefix = self.template.prefix_ids(self.tokenizer)
        shipped = {it: primer_named(it).tokens(self.template, self.tokenizer) for it in SHIPPED}
        return {
            ALONE: [prefix[:0]],
            MAIN: whole(TOKENS),
            "before": whole(TOKENS),
            "bare": [self.encode("".join(f"{it[1]}\n\n" for it in its)) for its in bare],
            "dialogue": [chunk(it.title, it.text) for it in told],
            "code": [chunk(*it, TOKENS) for it in random.Random(SEED).sample(long, o.texts)],
            "questions": [chunk("Questions", "\n".join(it[2] for it in its)) for its in drawn],
            "prefix": [prefix],
            "prefix repeated": [np.resize(prefix, TOKENS)],
            **{name: [ids] for name, ids in shipped.items()},
            **{f"cut {n}": [np.concatenate(its)[:n] for its in parts] for n in o.lengths},
            **{f"whole {n}": whole(n) for n in o.lengths if n >= PASSAGE},
        }

    def joined(self, text: str, tokens: int) -> list[str]:
        """A text of the file with those behind it, so that they have so many tokens."""
        at, found = self.file.index(text), [text]
        while len(self.encode("\n\n".join(found))) < tokens:
            found.append(self.file[(at + len(found)) % len(self.file)])
        return found

    def asked(self, prompts: Prompts, at: int) -> Asked:
        """A prompt as ``primed`` reads it, full attention's answer, and its logits [T + 1, V]."""
        if (prompts, at) not in self._asked:
            item, near, size = self.items[prompts.passages][at], self.near, prompts.tokens
            documents = passages_of(item, near.model, near.options.chunk_tokens)
            if size is not None:
                documents = [
                    Passage(self.encode("\n\n".join(self.joined(text, size)))[:size], title)
                    for title, text in item.documents
                ]
            ready = prepare(near.full, item.question, documents)
            [answer] = answered([ready], 1)
            forced = answer.token_ids[: near.options.answer_tokens - 1]
            [logits], _ = forced_along(near.model, ready, [forced])
            [primed] = near.arms.values()
            self._asked[prompts, at] = prepare(primed, item.question, documents), forced, logits
        return self._asked[prompts, at]

    def measure(self, cell: Cell) -> Result:
        """KL and agreement, means of the answer's tokens, and how many tokens the text has."""
        ready, forced, wanted = self.asked(cell.prompts, cell.at)
        prefix, chunks, store = ready.prompt.prefix, ready.prompt.chunks, self.near.store
        itself = cell.primer == "itself"
        named = ids = np.concatenate(chunks) if itself else self.texts[cell.primer][cell.text]
        encoding, encoder = ChunkEncoding(self.near.model, store, prefix, primer=ids), "primed"
        if itself:
            encoder = "neighbours_joint"
        elif cell.primer == "before":
            at = len(prefix) - len(self.encode(self.template.prefix))
            front = np.concatenate((prefix[:at], ids, prefix[at:]))
            encoding, encoder = dataclasses.replace(encoding, prefix=front), "after_prefix"
            named = np.concatenate((ids, prefix))
        # Whatever they are behind, the store has them as ``primed``, by a name of this cell alone.
        reader = ChunkEncoding(self.near.model, store, prefix, primer=named)
        kept = {reader.key("primed", it): ChunkInContext(it, (it,) * itself) for it in chunks}
        for made in encoding.encode(encoder, kept):
            record = reader.provenance("primed", ChunkInContext(made.chunk.ids))
            store.put(made.key, made.kv, record=record)
        request = dataclasses.replace(ready, primer=named)
        [logits], _ = forced_along(self.near.model, request, [forced])
        store.delete(list(kept))
        return {
            "kl": float(kl_divergence(wanted, logits).mean()),
            "same": float((wanted.argmax(1) == logits.argmax(1)).mean()),
            "primer_tokens": len(ids) / (len(chunks) if itself else 1),
        }


def run(o: PrimerOptions) -> Result:
    """Measure what is not kept yet; JSON-able."""
    study = Study(o)
    texts = {kind: [it.tolist() for it in its] for kind, its in study.texts.items()}
    setting = {
        "dataset": "nq_open",
        "passages": o.passages,
        "answer_tokens": study.near.options.answer_tokens,
        "seed": SEED,
        "model": described(Path(o.model).name, study.near.model, study.template),
    }
    cells = {json.dumps(it): it for it in plan(o)}
    with tempfile.TemporaryDirectory(prefix="jaxrag-") as folder:
        path = Path(f"{o.out or Path(folder) / 'primers'}{ITEMS}")
        known = xxhash.xxh3_64_hexdigest(json.dumps(texts).encode())
        with AnswerFile(path, setting | {"texts": known}) as file:
            waiting = [] if o.finished_only else [it for it in cells if it not in file.done]
            with progress_bar(len(waiting), "primers", "cell") as bar:
                for name in waiting:
                    file.write([{"id": name, **study.measure(cells[name])}])
                    bar.update(1)
        lines = {it["id"]: it for it in map(json.loads, path.read_text("utf-8").splitlines())}
    found = [(it, lines[name]) for name, it in cells.items() if name in lines]
    return setting | {"rows": rows_of(found), "machine": describe()}


def rows_of(lines: Sequence[tuple[Cell, Result]]) -> list[Result]:
    """A row for each kind on prompts of one form, its differences paired by prompt."""
    found: dict[tuple[Prompts, str], dict[int, dict[int, Result]]] = {}
    for cell, line in lines:
        row = found.setdefault((cell.prompts, cell.primer), {})
        row.setdefault(cell.at, {})[cell.text] = line

    def mean(row: dict[int, dict[int, Result]], part: str, at: Sequence[int]) -> HostArray:
        return np.array([np.mean([it[part] for it in row[prompt].values()]) for prompt in at])

    rows = []
    for (prompts, primer), row in found.items():
        at, alone, main = [*row], found[prompts, ALONE], found.get((prompts, MAIN), {})
        kl, same, without = mean(row, "kl", at), mean(row, "same", at), mean(alone, "kl", at)
        less = bootstrapped(kl - without, SEED)
        both = [it for it in at if it in main]
        beside = mean(row, "kl", both) - mean(main, "kl", both)
        texts = [
            {prompt: {text: its[text]} for prompt, its in row.items() if text in its}
            for text in sorted({*itertools.chain(*row.values())})
        ]
        rows.append({
            "passages": prompts.passages,
            "chunk_tokens": prompts.tokens,
            "primer": primer,
            "primer_tokens": float(mean(row, "primer_tokens", at).mean()),
            "prompts": len(at),
            "measured": sum(map(len, row.values())),
            "kl": bootstrapped(kl, SEED),
            "kl_minus_none": less,
            "told_apart": (less["high"] - less["low"]) / 2,
            "kl_over_none": bootstrapped(kl, SEED, over=without),
            "kl_minus_encyclopaedia": bootstrapped(beside, SEED) if both else None,
            "same_tokens": bootstrapped(same, SEED),
            "same_minus_none": bootstrapped(same - mean(alone, "same", at), SEED),
            "kl_over_none_of_texts": [
                float(mean(it, "kl", [*it]).sum() / mean(alone, "kl", [*it]).sum()) for it in texts
            ],
        })  # fmt: skip
    return rows


if __name__ == "__main__":
    sys.exit(run_script(__doc__, PrimerOptions, run, more=OUT))
