"""`jaxrag demo`: the whole path with the model that comes along: ingest a village, ask about it.

The questions are answered with full attention, with TurboRAG and with Block-Attention; last, by the
weights that were not fine-tuned for reuse. Exit code 1 when a document had to be encoded at
question time, or the fine-tuned model gave a wrong answer. Then questions over passages of 2,000
tokens, both ways, which show what reuse saves.
"""

import dataclasses
import json
import shutil
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxrag.base.config import ModelOptions
from jaxrag.base.installed import DATA, unpack
from jaxrag.cli import handbook
from jaxrag.cli.command import SUMMARIES, Args, command, fields, flag, value
from jaxrag.cli.options import JSON
from jaxrag.cli.output import give, human_count, print_json, shorten, table

METHODS = ("full_attention", "turborag", "block_attention")
WEIGHTS = {"full": "trained with full attention", "dual": "then fine-tuned to read both ways"}
K = 6  # chunks a question
CHUNK_TOKENS = 20  # the village's paragraphs have 8 to 19
NEEDED = 8  # right answers of the fine-tuned weights, with every method
MAX_NEW_TOKENS = 8
REGISTERS = 4  # documents of examples/valley a question: 2,000 tokens
ASKED = 8  # of the questions about them


@dataclasses.dataclass(frozen=True)
class DemoQuestion:
    """One question of the file, and the results of it by method."""

    question: str
    answers: tuple[str, ...]
    kind: str
    results: dict[str, Any]

    def is_right(self, method: str) -> bool:
        """Whether the answer is one of the expected ones, word for word."""
        return self.results[method].text.strip() in self.answers


def run(args: Args) -> int:
    """Run the demo and print it, or one JSON object."""
    if args.unpack is not None:
        made = [str(path) for path in unpack(args.unpack)]
        give(args, {"unpacked": made}, made)
        return 0
    if args.model is not None:
        return handbook.run(args)
    from jaxrag.engine.engine import engine_of
    from jaxrag.models.compiled import keep_compiled
    from jaxrag.models.model import load_model
    from jaxrag.models.spec import num_params

    keep_compiled()
    k = args.k or K
    questions = DATA / "examples" / "village-questions.jsonl"
    rows = [json.loads(line) for line in questions.read_text(encoding="utf-8").splitlines()]
    found: dict[str, list[DemoQuestion]] = {}
    warm: list[DemoQuestion] = []
    for weights in ("dual", "full"):
        say = _silent if args.json or weights == "full" else print
        model = load_model(args.models / weights)
        say(
            f"1. The model: synthetic-0.8m/{weights}, "
            f"{human_count(num_params(model.config))} parameters, {WEIGHTS['full']},\n"
            f"   {WEIGHTS[weights]}. Its vocabulary: {model.text_tokenizer().vocab_size} words "
            "of a small\n   invented language."
        )
        with _ingest(model, args.work / f"kb-{weights}", say) as kb:
            if weights == "dual":
                say(f"3. Ask {len(rows)} questions, after a round that compiles.\n")
                warm = _ask(kb, rows, k)
                engine_of(model).forget()  # so that TTFT includes reading chunks from the store
            found[weights] = _ask(kb, rows, k)
    asked = found["dual"]
    right = {
        weights: {method: sum(one.is_right(method) for one in found[weights]) for method in METHODS}
        for weights in WEIGHTS
    }
    long = _ask_valley(args.models / "long-dual", args.work / "kb-long")
    everything = [*warm, *found["dual"], *found["full"]]
    encoded = sum(one.results[m].counts["encoded"] for one in everything for m in METHODS[1:])
    encoded += sum(one.results["turborag"].counts["encoded"] for one in long)
    saved = _saved(long)
    passed = not encoded and min(*right["dual"].values(), *saved["right"].values()) >= NEEDED
    if args.json:
        print_json(
            {
                "passed": passed,
                "questions": len(rows),
                "right": right,
                "encoded": encoded,
                "saved": saved,
                "asked": [
                    {
                        "question": one.question,
                        "answers": one.answers,
                        "kind": one.kind,
                        "results": {m: r.to_dict() for m, r in one.results.items()},
                    }
                    for one in asked
                ],
            }
        )
    else:
        _print_answers(asked)
        _print_comparison(right, len(rows))
        print(
            f"\nturborag and block_attention encoded {encoded} chunk tokens at question time"
            + (":\neverything came from the knowledge base." if not encoded else ".")
        )
        print(
            "\nAsk it yourself:\n"
            f'  jaxrag ask "{rows[0]["question"]}" --kb {args.work / "kb-dual"} --k {k}'
        )
        _print_saved(saved, long)
        if not passed:
            print(
                f"jaxrag demo: FAILED: expected {NEEDED} right answers of the fine-tuned weights "
                "with every method, and no chunk encoded at question time",
                file=sys.stderr,
            )
    return 0 if passed else 1


def _silent(text: str) -> None:
    """Say nothing."""


def _ingest(model: Any, folder: Path, say: Callable[[str], None]) -> Any:
    """A new knowledge base of the village; returns it open."""
    from jaxrag.library.documents import read_paths
    from jaxrag.library.knowledge_base import KnowledgeBase

    shutil.rmtree(folder, ignore_errors=True)
    kb = KnowledgeBase.open(
        folder,
        model=model,
        chunk_by="sentence",
        chunk_tokens=CHUNK_TOKENS,
        overlap=0,
        encoders=["isolated"],  # also for the weights that were not trained to read it
    )
    report = kb.add(read_paths([DATA / "examples" / "village"]))
    say(
        f"2. Ingest examples/village: {report.documents} documents, {report.chunks} chunks, "
        f"{report.tokens} tokens,\n   each encoded once ({report.seconds:.1f} s)."
    )
    for bad in report.skipped:
        print(f"   skipped {bad.source}: {bad.reason}", file=sys.stderr)
    return kb


def _ask_valley(weights: Path, folder: Path) -> list[DemoQuestion]:
    """Questions over 2,000 tokens of passages each, both ways, after a round of the same."""
    from jaxrag.library.documents import read_paths
    from jaxrag.library.knowledge_base import KnowledgeBase
    from jaxrag.models.model import load_model

    file = DATA / "examples" / "valley-questions.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines()[:ASKED]
    rows = [{**json.loads(line), "kind": "hop1"} for line in lines]
    shutil.rmtree(folder, ignore_errors=True)
    model = load_model(weights)
    with KnowledgeBase.open(folder, model=model, chunk_tokens=512, overlap=0) as kb:
        kb.add(read_paths([DATA / "examples" / "valley"]))
        _ask(kb, rows, REGISTERS, METHODS[:2])
        return _ask(kb, rows, REGISTERS, METHODS[:2])


def _saved(asked: Sequence[DemoQuestion]) -> dict[str, Any]:
    """What reuse saves: right answers, medians of the time to first token in seconds, tokens."""
    full, turbo = METHODS[:2]
    ttft = {
        name: statistics.median(one.results[name].timings["ttft"] for one in asked)
        for name in (full, turbo)
    }
    return {
        "questions": len(asked),
        "right": {name: sum(one.is_right(name) for one in asked) for name in (full, turbo)},
        "ttft": ttft,
        "times_sooner": ttft[full] / ttft[turbo],
        "passage_tokens": sum(sum(one.results[turbo].counts.values()) for one in asked),
        "reused_tokens": sum(one.results[turbo].counts["reused"] for one in asked),
    }


def _ask(
    kb: Any, rows: Sequence[dict[str, Any]], k: int, methods: Sequence[str] = METHODS
) -> list[DemoQuestion]:
    """Every question with every method, one at a time."""
    from jaxrag.serve.generate import generate

    return [
        DemoQuestion(
            row["question"],
            tuple(row["answers"]),
            row["kind"],
            {
                method: generate(
                    row["question"], kb=kb, method=method, k=k, max_new_tokens=MAX_NEW_TOKENS
                )
                for method in methods
            },
        )
        for row in rows
    ]


def _print_answers(asked: Sequence[DemoQuestion]) -> None:
    full, turbo = METHODS[:2]
    print(table([[str(n), one.kind, one.question] for n, one in enumerate(asked, 1)], right=(0,)))
    rows = [
        ["", "", "", "", "TTFT", "(ms)", "FLOP", ""],
        ["", "expected", "full attention", turbo, "full", "turbo", "full", "turbo"],
    ]
    reused = total = 0
    for number, one in enumerate(asked, 1):
        results = [one.results[method] for method in (full, turbo)]
        cells = [str(number), shorten(one.answers[0], 12)]
        for method in (full, turbo):
            mark = "" if one.is_right(method) else " WRONG"
            cells.append(shorten(one.results[method].text, 12 - len(mark)) + mark)
        cells += [f"{1000 * result.timings['ttft']:.1f}" for result in results]
        cells += [human_count(result.flops) for result in results]
        rows.append(cells)
        reused += results[1].counts["reused"]
        total += sum(results[1].counts.values())
    print("\n" + table(rows, right=(0, 4, 5, 6, 7)))
    print(
        f"\n   turborag reused {reused} of {total} chunk tokens. "
        "hop1: said of the person by name;\n"
        "   cross: said of 'she' or 'he', whose name is in the chunk before; latest: a\n"
        "   later chunk corrects it; hop2: through a second document. A chunk is read\n"
        "   from disk when it is first needed, then it is in the pool. Prompts this short\n"
        "   are prefilled in no time: 5 has longer ones."
    )


def _print_comparison(right: dict[str, dict[str, int]], count: int) -> None:
    rows = [["right answers", *METHODS]]
    for weights, name in WEIGHTS.items():
        rows.append([name, *(f"{right[weights][method]} of {count}" for method in METHODS)])
    print("\n4. Why fine-tuning matters: the same questions to both sets of weights.\n")
    print(table(rows, right=(1, 2, 3)))


def _print_saved(saved: dict[str, Any], asked: Sequence[DemoQuestion]) -> None:
    full, turbo = METHODS[:2]
    count, right = saved["questions"], saved["right"]
    print(
        f"\n5. What it saves: {count} questions over examples/valley, {REGISTERS} chunks of some\n"
        "   500 tokens each, with synthetic-0.8m/long-dual, after a round of the same.\n"
    )
    cells = [
        [question.question, shorten(question.results[turbo].text, 14), *(
            f"{1000 * question.results[name].timings['ttft']:.0f} ms" for name in (full, turbo)
        )]
        for question in asked
    ]  # fmt: skip
    print(table([["", "turborag", "full", "turbo"], *cells], right=(2, 3)))
    before, after = (f"{1000 * saved['ttft'][name]:.0f}" for name in (full, turbo))
    print(
        f"\n{saved['times_sooner']:.0f}x sooner: first token after {after} ms instead of {before} "
        f"(medians; {right[turbo]} of {count} right, {right[full]}\nwith full attention), "
        f"{saved['reused_tokens']:,} of {saved['passage_tokens']:,} passage tokens reused\n\n"
        "A pretrained model reads a manual of 60 pages: jaxrag demo --model MODEL"
    )


COMMAND = command(
    "demo",
    run,
    SUMMARIES["demo"],
    "jaxrag demo --k 6",
    value(
        "--model",
        "MODEL",
        "instead, a manual of 60 pages asked with an instruct model of yours: a directory, a GGUF "
        "file, or ORG/NAME of the hub",
    ),
    fields(ModelOptions, only=("dtype",)),
    flag("--all", f"with --model: all 60 questions, not {handbook.FEW} of them"),
    value("--k", "N", f"chunks a question ({K}; with --model {handbook.CHUNKS})", type=int),
    value(
        "--work",
        "DIR",
        "for the knowledge bases, made anew each time (jaxrag-demo)",
        Path("jaxrag-demo"),
        type=Path,
    ),
    value(
        "--models",
        "DIR",
        "with the model directories full/ and dual/ (those that come along)",
        DATA / "checkpoints" / "synthetic-0.8m",
        type=Path,
    ),
    value(
        "--unpack",
        "DIR",
        "instead, copy model, documents and configurations there, as the manual names "
        "them: checkpoints/, examples/ and configs/",
        type=Path,
    ),
    JSON,
)
