"""Formats of stored KV: bytes, answers and the time to the first token from a slow store.

Every question is asked over the same chunks, encoded once and stored in every format, and compared
with the answers from KV as it is. Two tasks, both cut into chunks of up to --chunk-tokens tokens:
"documents" are 50 short texts about people, every sentence of which may be asked for; "needles" are
one fact (passkey) or one of many (kv_retrieval) in a text that is not asked about.

    python benchmarks/formats.py --out FILE.json --markdown FILE.md --plot FILE.png
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from script import Result, run_script

from jaxrag.base.errors import RequestError
from jaxrag.base.options import option, parse_names
from jaxrag.engine.sampling_params import SamplingParams
from jaxrag.kv.store import KVStore, MemoryStore, chunk_key, derive
from jaxrag.kv.store.layout import STORED
from jaxrag.measure.bench.throttle import SlowLink, Throttled
from jaxrag.measure.evals.long import run as long_run
from jaxrag.measure.evals.options import LongOptions
from jaxrag.measure.evals.statistics import difference, plain, share
from jaxrag.measure.machine import describe
from jaxrag.measure.subject import described, format_of
from jaxrag.models.model import Model, load_model
from jaxrag.models.text.progress import progress_bar
from jaxrag.reuse.methods import method_named
from jaxrag.serve.answers import serve
from jaxrag.serve.ask import Ask
from jaxrag.serve.questions import ReadyQuestion, Settings, prepare, resolve
from jaxrag.tasks.synthetic import SyntheticTask, samples

_ANSWER_TOKENS = 12
_WARM = 2  # prompts before those that are timed


@dataclasses.dataclass(frozen=True)
class Options:
    """What is measured."""

    models: tuple[str, ...] = option(
        ("checkpoints/synthetic-0.8m/long-dual", "checkpoints/synthetic-2.3m/deep-dual"),
        "directories of models",
        "DIR,...",
        parse=parse_names,
    )
    formats: tuple[str, ...] = option(
        STORED, "native first, with which the others are compared", "NAME,...", parse=parse_names
    )
    method: str = option("turborag", "how chunks are reused", "NAME")
    questions: int = option(1000, "of the documents", "N")
    needles: int = option(200, "questions of the needles; each has a text of its own", "N")
    chunk_tokens: int = option(512, "most tokens of a chunk", "N")
    batch_size: int = option(16, "questions that run together", "N")
    rate: float = option(40e6, "of the slow store, bytes a second", "N")
    rounds: int = option(11, "prompts that are timed in every format, one after the other", "N")
    seed: int = option(8, "of the questions", "N")
    plot: str = option("", "a picture of bytes against accuracy", "FILE.png")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Chunks and what is asked of them; ``group`` is the same for questions on one text."""

    chunks: tuple[str, ...]
    question: str
    answer: str
    group: int


def run(options: Options) -> Result:
    """Measure; JSON-able."""
    unknown = set(options.formats) - set(STORED)
    if unknown or not options.formats or options.formats[0] != "native":
        raise RequestError(f"--formats: expected native first, then some of {', '.join(STORED)}")
    found = {}
    for path in options.models:
        model = load_model(path, dtype="bfloat16")
        tasks = {}
        first = _first_token(options, path, model)
        for task, make in TASKS.items():
            prompts = make(options, path, model)
            if prompts:
                tasks[task] = _accuracy(options, model, prompts, f"{Path(path).name} {task}")
        found[path] = {
            "model": described(path, model, format_of(model, None)),
            "tasks": tasks,
            "first_token": first,
        }
    kept = {name: it for name, it in dataclasses.asdict(options).items() if name != "plot"}
    result = {"options": kept, "machine": describe(), "models": found}
    if options.plot:
        draw(result, options.plot)
    return result


def _documents(options: Options, path: str, model: Model) -> list[Prompt]:
    """Some 850 tokens of short texts, joined to chunks, and up to 24 questions on them."""
    task = SyntheticTask(chunks=(48, 50), relations=3, full_names=1.0, questions=24, split="test")
    tokenizer = model.text_tokenizer()
    found: list[Prompt] = []
    for number, one in enumerate(samples(task, options.seed)):
        lengths = [len(tokenizer.encode(f" {text}")) for text in one.chunks]
        count = -(-sum(lengths) // options.chunk_tokens)
        ends = np.searchsorted(np.cumsum(lengths), np.arange(1, count) * sum(lengths) / count)
        edges = [0, *(int(end) for end in ends), len(lengths)]
        chunks = tuple(" ".join(one.chunks[a:b]) for a, b in itertools.pairwise(edges))
        found += [Prompt(chunks, it.question, it.answer, number) for it in one.questions]
        if len(found) >= options.questions:
            return found[: options.questions]
    raise AssertionError("the sequence has no end")


def _needles(options: Options, path: str, model: Model) -> list[Prompt]:
    """One fact, or one of many, in 1,024 and in 2,048 tokens."""
    kinds, lengths = ("passkey", "kv_retrieval"), (1024, 2048)
    wanted = LongOptions(
        suite="infinitebench", model=path, lengths=lengths, flavour="village", tasks=kinds,
        questions=-(-options.needles // (len(kinds) * len(lengths))), seed=options.seed,
        chunk_tokens=options.chunk_tokens, lead=False, dtype="bfloat16",
    )  # fmt: skip
    rows = long_run.prompts(wanted, progress=False)
    return [
        Prompt(tuple(row["chunks"]), row["question"], row["answers"][0], number)
        for number, row in enumerate(rows[: options.needles])
    ]


TASKS = {"documents": _documents, "needles": _needles}


def _store(model: Model, form: str, salt: str = "") -> MemoryStore:
    stored: Any = form
    layout = dataclasses.replace(model.kv_layout, stored=stored)
    limit = model.config.max_positions
    return MemoryStore(derive(model.fingerprint, form, salt), layout, max_tokens=limit)


def _settings(options: Options, model: Model, store: KVStore, tokens: int) -> Settings:
    ask = Ask(method=method_named(options.method), max_new_tokens=tokens)
    return resolve(ask, model=model, store=store)


def _fill(source: MemoryStore, target: MemoryStore) -> None:
    """Put every chunk of a store into one of another format."""
    for record in source.records():
        origin = record.provenance
        key = chunk_key(target.fingerprint, origin.content_id, origin.context_id)
        target.put(key, source.get(record.key), record=origin)


def _accuracy(
    options: Options, model: Model, prompts: Sequence[Prompt], what: str
) -> dict[str, Any]:
    groups = np.array([prompt.group for prompt in prompts])
    right: dict[str, Any] = {}
    rows, native = {}, _store(model, "native")
    with progress_bar(len(prompts) * len(options.formats), what, "question") as bar:
        for form in options.formats:
            store = native
            if form != "native":
                store = _store(model, form)
                _fill(native, store)
            settings = _settings(options, model, store, _ANSWER_TOKENS)
            hits = np.zeros(len(prompts))
            for batch in _answers(settings, prompts, options.batch_size):
                for index, text in batch.items():
                    hits[index] = text.strip().strip(".") == prompts[index].answer.strip().strip(
                        "."
                    )
                bar.update(len(batch))
            right[form] = hits
            sizes = [(it.tokens, it.nbytes) for it in store.records()]
            tokens, nbytes = map(sum, zip(*sizes, strict=True))
            full = model.kv_layout.nbytes(tokens)
            rows[form] = {
                "bytes": nbytes,
                "of_bfloat16": nbytes / full,
                "chunks": len(sizes),
                "tokens_of_a_chunk": tokens / len(sizes),
                "accuracy": plain(share(hits, groups)),
                "less_native": plain(difference(hits, right["native"], groups)),
                "other_answers": float((hits != right["native"]).mean()),
            }
    return rows


def _answers(
    settings: Settings, prompts: Sequence[Prompt], batch_size: int
) -> Iterator[dict[int, str]]:
    for start in range(0, len(prompts), 64):
        ready = [_ready(settings, prompt) for prompt in prompts[start : start + 64]]
        for batch in serve(ready, batch_size):
            yield {start + index: result.text for index, result in batch.items()}


def _ready(settings: Settings, prompt: Prompt) -> ReadyQuestion:
    return prepare(settings, prompt.question, list(prompt.chunks), SamplingParams())


def _first_token(options: Options, path: str, model: Model) -> dict[str, Any]:
    """Seconds to the first token of prompts that no one asked before, over the slow link.

    In rounds: a round is one prompt of four texts in every format, in an order that changes.
    """
    count = 4 * (options.rounds + _WARM)
    more = dataclasses.replace(options, questions=24 * count, seed=options.seed + 1)
    texts = {it.group: it for it in _documents(more, path, model)}
    asked = [
        Prompt(tuple(chunk for it in four for chunk in it.chunks), four[0].question, "", 0)
        for four in itertools.batched(list(texts.values())[:count], 4)
    ]
    native = _store(model, "native")
    seconds: dict[str, list[float]] = {form: [] for form in options.formats}
    plain_settings = _settings(options, model, native, 1)
    for prompt in asked:
        list(serve([_ready(plain_settings, prompt)], 1))
    links = {}
    for form in options.formats:
        inner = _store(model, form, "timed")  # no key of it is in the pool
        _fill(native, inner)
        links[form] = _settings(options, model, Throttled(inner, SlowLink(options.rate)), 1)
    for number, prompt in enumerate(asked):
        turn = number % len(options.formats)
        for form in (*options.formats[turn:], *options.formats[:turn]):
            start = time.perf_counter()
            list(serve([_ready(links[form], prompt)], 1))
            if number >= _WARM:
                seconds[form].append(time.perf_counter() - start)
    first = seconds["native"]
    return {
        form: {
            "seconds": statistics.median(each),
            "times_sooner": statistics.median(a / b for a, b in zip(first, each, strict=True)),
        }
        for form, each in seconds.items()
    }


def report(result: Result) -> list[str]:
    """A table for each model and task."""
    lines = []
    for path, one in result["models"].items():
        for task, rows in one["tasks"].items():
            lines += [f"{Path(path).name}, {task}", "", *_HEAD]
            lines += [_row(form, row, one["first_token"][form]) for form, row in rows.items()]
            lines.append("")
    return lines


_HEAD = (
    "| format | bytes, % of bfloat16 | right, % | less native, points | first token, ms | sooner |",
    "| --- | ---: | ---: | ---: | ---: | ---: |",
)


def _row(form: str, row: dict[str, Any], first: dict[str, float]) -> str:
    right, less = row["accuracy"], row["less_native"]
    low, value, high = (100 * less[name] for name in ("low", "value", "high"))
    return (
        f"| {form} | {100 * row['of_bfloat16']:.1f} | {100 * right['value']:.1f} "
        f"| {value:+.1f} [{low:+.1f}, {high:+.1f}] | {1e3 * first['seconds']:.0f} "
        f"| {first['times_sooner']:.2f} |"
    )


def markdown(result: Result) -> str:
    """The tables, with what they are of."""
    options, where = result["options"], result["machine"]
    head = [
        "# Formats of stored KV",
        "",
        f"`python benchmarks/formats.py`, {where['cpu']}, commit {where['commit']}. Method "
        f"`{options['method']}`, chunks of up to {options['chunk_tokens']} tokens, bfloat16. "
        "Differences are paired, with 95 % intervals. First token: prompts of some 3,400 tokens "
        f"that nobody asked before, from a store of {options['rate'] / 1e6:.0f} MB/s, medians of "
        f"{options['rounds']} rounds.",
        "",
    ]
    return "\n".join([*head, *report(result)])


def draw(result: Result, path: str) -> None:
    """Bytes against accuracy, a line for each model and task."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name, one in result["models"].items():
        for task, rows in one["tasks"].items():
            found = [(100 * r["of_bfloat16"], r["accuracy"]) for r in rows.values()]
            x = [share for share, _ in found]
            y = [100 * right["value"] for _, right in found]
            spread = [
                [100 * (right["value"] - right["low"]) for _, right in found],
                [100 * (right["high"] - right["value"]) for _, right in found],
            ]
            axes.errorbar(x, y, spread, marker="o", capsize=3, label=f"{Path(name).name}, {task}")
    axes.set(
        xlabel="bytes, % of bfloat16", ylabel="questions right, %", xscale="log", ylim=(0, 101)
    )
    axes.set_xticks([7, 10, 14, 28, 56, 100], labels=["7", "10", "14", "28", "56", "100"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, Options, run, report, markdown=markdown))
