"""Right answers over pasted passages, read as blocks, beside full attention, by a trained model.

Rows of scripts/make_long_documents.py: passages about invented people, and questions on them with
short answers. Each question is asked three ways: as the model was trained, with full attention;
with its passages pasted into a message, joined by empty lines, with full attention; and the same
message with its passages read as blocks. The chat template writes the messages' texts and nothing
else, as the model knows the words of its language only. Each question of a row begins with another
of its passages and goes round, so that prompts have only the system's message in front in common;
the share of tokens of blocks that come from KV is told, from the second question of a row on.

rows: python scripts/make_long_documents.py runs/pasted.jsonl --split test --seed 7 --rows 30,
with --tokens 2048 --chunk-tokens 128

example: python benchmarks/plain_answers.py --rows runs/pasted.jsonl --out plain-answers.json
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from script import Result, run_script
from tqdm import tqdm

from jaxrag.base.errors import RequestError
from jaxrag.base.options import option
from jaxrag.engine.reuse import PartReuse
from jaxrag.measure.evals.metrics import exact_match
from jaxrag.measure.evals.statistics import difference, plain, share
from jaxrag.measure.machine import describe
from jaxrag.models.model import Model, load_model
from jaxrag.models.text.tokenizer import Tokenizer
from jaxrag.serve.generate import generate

_CHAT = "{% for m in messages %}{{ m.content }} {% endfor %}"
_TOLD = "Read the documents and answer the question."
OWN, FULL, BLOCKS = "as trained, full attention", "pasted, full attention", "pasted, as blocks"


@dataclasses.dataclass(frozen=True)
class Options:
    """What is asked, and of whom."""

    rows: str = option("runs/pasted.jsonl", "JSON lines", "FILE")
    model: str = option("checkpoints/synthetic-0.8m/long-dual", "directory", "DIR")
    method: str = option("turborag", "of reuse", "NAME")
    rules: str = option("common", "for passages: a name, or a file", "NAME")
    questions: int = option(10, "of a row, at most", "N")


def run(options: Options) -> Result:
    """Every question in every way."""
    if not Path(options.rows).is_file():
        raise RequestError(f"--rows {options.rows}: no such file; the head of this script makes it")
    own = load_model(options.model, cache_tokens=65536)
    chatting = _with_chat(own)
    right: dict[str, list[bool]] = {OWN: [], FULL: [], BLOCKS: []}
    samples, found, again = list[int](), 0, 0
    lines = Path(options.rows).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(tqdm(lines, "rows", file=sys.stderr)):
        row = json.loads(line)
        for at, asked in enumerate(row["questions"][: options.questions]):
            passages = [*row["chunks"][at:], *row["chunks"][:at]]
            question, golds = asked["question"], asked["answers"]
            texts: dict[str, Any] = {
                OWN: generate(
                    model=own, documents=passages, question=question, method="full_attention",
                    max_new_tokens=8,
                ),
            }  # fmt: skip
            messages = _messages(passages, question)
            given: Any = {"model": chatting, "messages": messages, "max_new_tokens": 8}
            texts[FULL] = generate(**given, method="full_attention")
            texts[BLOCKS] = generate(
                **given, method=options.method, plain="passages", passage_rules=options.rules
            )
            for name, answer in texts.items():
                right[name].append(exact_match(answer.text, golds))
            samples.append(number)
            if at:
                hit, all_ = _tokens(texts[BLOCKS].reuse)
                found, again = found + hit, again + all_
    of: Any = np.array(samples)
    values = {name: np.array(it) for name, it in right.items()}
    return {
        "options": {k: v for k, v in dataclasses.asdict(options).items() if k != "rows"},
        "rows": len(lines),
        "right": {name: plain(share(it, of)) for name, it in values.items()},
        "blocks_less_full": plain(difference(values[BLOCKS], values[FULL], of)),
        "full_less_own": plain(difference(values[FULL], values[OWN], of)),
        "of_passages": round(found / again, 4) if again else None,
        "machine": describe(),
    }


def _messages(passages: Sequence[str], question: str) -> list[dict[str, str]]:
    pasted = "\n\n".join(passages)
    return [
        {"role": "system", "content": _TOLD},
        {"role": "user", "content": f"{pasted}\n\nQuestion: {question} Answer:"},
    ]


def _with_chat(model: Model) -> Model:
    """The same with a chat template of no words of its own."""
    assert model.path is not None
    folder = Path(model.path)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    made = Tokenizer((folder / "tokenizer.json").read_bytes(), settings, {"default": _CHAT})
    return dataclasses.replace(model, tokenizer=made, template=None)


def _tokens(reuse: Sequence[PartReuse]) -> tuple[int, int]:
    """Of the passages' blocks, tokens whose KV was found, and all."""
    rows = [it for it in reuse if it.part.startswith("chunk")]
    return sum(it.tokens for it in rows if it.how == "chunk hit"), sum(it.tokens for it in rows)


def report(result: Result) -> list[str]:
    """The table."""
    lines = [f"{'right answers':30} share  95 % interval"]
    for name, it in result["right"].items():
        lines.append(f"{name:30} {it['value']:5.3f}  [{it['low']:.3f}, {it['high']:.3f}]")
    for name in ("blocks_less_full", "full_less_own"):
        it = result[name]
        lines.append(f"{name:30} {it['value']:+5.3f}  [{it['low']:+.3f}, {it['high']:+.3f}]")
    if result["of_passages"] is not None:
        lines.append(f"tokens of blocks from KV, second questions on: {result['of_passages']:.3f}")
    return lines


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, Options, run, report))
