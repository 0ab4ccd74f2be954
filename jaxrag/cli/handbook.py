"""`jaxrag demo --model`: a manual of an observatory, asked with full attention and from its cache.

Every question is answered twice over the same chunks: all of the prompt computed, and with the
method that a user of this model gets by default. An answer is right where the words of an accepted
one stand in it.
"""

import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrag.base.errors import RequestError
from jaxrag.base.installed import DATA
from jaxrag.cli.command import Args
from jaxrag.cli.opening import load
from jaxrag.cli.output import counted, human_count, print_json, shorten

if TYPE_CHECKING:
    from jaxrag.library.knowledge_base import KnowledgeBase
    from jaxrag.models.model import Model
    from jaxrag.serve.answers import Result

HANDBOOK = DATA / "examples" / "handbook"
QUESTIONS = DATA / "examples" / "handbook-questions.jsonl"
FEW = 6  # of the questions, spread over the file, whose kinds stand one behind the other
CHUNKS = 5  # a question, as `jaxrag ask` takes
MAX_NEW_TOKENS = 48
_WIDTH = 88  # of an answer, in columns


@dataclasses.dataclass(frozen=True)
class BothWays:
    """One question, and what came of it both ways."""

    question: str
    answers: tuple[str, ...]
    full: "Result"
    reuse: "Result"

    def right(self) -> dict[str, bool]:
        """Which of both is right."""
        from jaxrag.measure.evals.metrics import holds

        return {
            "full_attention": holds(self.full.text, self.answers),
            "reuse": holds(self.reuse.text, self.answers),
        }


def run(args: Args) -> int:
    """Run it and print it, or one JSON object."""
    from jaxrag.base.config import ModelOptions
    from jaxrag.models.spec import num_params
    from jaxrag.reuse.methods import default_choice

    say, k = _silent if args.json else print, args.k or CHUNKS
    model = load(args.model, ModelOptions(dtype=args.dtype))
    if not model.text_tokenizer().has_chat_template:
        raise RequestError(
            f"--model {args.model} has no chat template, so nothing says how it is asked: expected "
            "an instruct model, such as the one that `make real` fetches"
        )
    method = default_choice(model.config, model.reading).method.name
    parameters = human_count(num_params(model.config))
    say(f"1. The model: {args.model}, {parameters} parameters, in {model.config.dtype}.")
    kb = _ingest(args.work / "kb-handbook", model, say)
    with kb:
        rows = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
        chosen = rows if args.all else rows[:: max(1, len(rows) // FEW)]
        say(
            f"3. {len(chosen)} of {len(rows)} questions, each over the same {k} chunks: with "
            f"full attention, then with\n   {method}. The first is asked once before, to compile.\n"
        )
        _ask(kb, chosen[0], k)
        asked = []
        for number, row in enumerate(chosen, 1):
            asked.append(_ask(kb, row, k))
            say(_answer_lines(number, asked[-1]))
        summary = _summary(asked)
    if args.json:
        print_json(
            {
                "model": str(args.model),
                "method": method,
                **summary,
                "asked": [
                    {
                        "question": question.question,
                        "answers": question.answers,
                        "right": question.right(),
                        "full_attention": question.full.to_dict(),
                        "reuse": question.reuse.to_dict(),
                    }
                    for question in asked
                ],
            }
        )
        return 0
    right, ttft, tokens = summary["right"], summary["ttft"], summary["computed"]
    print(
        f"4. Right: {right['full_attention']} of {len(asked)} with full attention, "
        f"{right['reuse']} with {method}.\n   {counted(summary['same'], 'answer')} the same to the "
        f"letter. First token (median): {ttft['full_attention']:.2f} s and\n   "
        f"{ttft['reuse']:.2f} s; chunk tokens computed: {tokens['full_attention']:,} and "
        f"{tokens['reuse']:,}.\n\n"
        "Ask it yourself:\n"
        f'  jaxrag ask "{chosen[0]["question"]}" --kb {args.work / "kb-handbook"}'
    )
    return 0


def _silent(text: str) -> None:
    """Say nothing."""


def _ingest(folder: Path, model: "Model", say: Callable[[str], None]) -> "KnowledgeBase":
    """The knowledge base of the handbook, open; what it has already is not encoded again."""
    from jaxrag.library.documents import read_paths
    from jaxrag.library.knowledge_base import KnowledgeBase

    kb = KnowledgeBase.open(folder, model=model)
    report = kb.add(read_paths([HANDBOOK]), progress=say is print)
    stored = kb.stats()["stored"]["bytes"]
    text = sum(path.stat().st_size for path in HANDBOOK.iterdir())
    say(
        f"2. The handbook: {counted(report.documents, 'file')}, {counted(report.chunks, 'chunk')}, "
        f"{report.tokens:,} tokens; {report.encoded} encoded in {report.seconds:.1f} s.\n"
        f"   {human_count(text)}B of text are {human_count(stored)}B of KV in {folder}."
    )
    return kb


def _ask(kb: "KnowledgeBase", row: Any, k: int) -> BothWays:
    from jaxrag.serve.generate import generate

    full, reuse = (
        generate(row["question"], kb=kb, k=k, max_new_tokens=MAX_NEW_TOKENS, method=method)
        for method in ("full_attention", None)
    )
    return BothWays(row["question"], tuple(row["answers"]), full, reuse)


def _computed(answer: "Result") -> int:
    """Prompt tokens that were run."""
    return sum(count for name, count in answer.counts.items() if name != "reused")


def _answer_lines(number: int, both: BothWays) -> str:
    lines = [f"{number}. {both.question}", f"   expected        {both.answers[0]}"]
    for (name, right), answer in zip(both.right().items(), (both.full, both.reuse), strict=True):
        shown = shorten(answer.text, _WIDTH)
        lines.append(
            f"   {name.replace('_', ' '):<14}  {shown}\n"
            f"   {'':<14}  {'right' if right else 'WRONG'}; first token after "
            f"{answer.timings['ttft']:.2f} s, {_computed(answer):,} chunk tokens computed"
        )
    return "\n".join(lines) + "\n"


def _summary(asked: Sequence[BothWays]) -> dict[str, Any]:
    ways = {"full_attention": [it.full for it in asked], "reuse": [it.reuse for it in asked]}
    return {
        "questions": len(asked),
        "right": {way: sum(it.right()[way] for it in asked) for way in ways},
        "same": sum(it.full.text == it.reuse.text for it in asked),
        "ttft": {
            way: statistics.median(it.timings["ttft"] for it in those)
            for way, those in ways.items()
        },
        "computed": {way: sum(map(_computed, those)) for way, those in ways.items()},
    }
