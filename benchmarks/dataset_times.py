"""Time to first token from text on the prompts of data sets.

A random Llama with a byte-level tokenizer that is trained on the texts of the data sets is asked as
`jaxrag eval dataset` asks: every question is put to every method as text. The weights are random,
so no answer is scored.

The data folder has RGB's ``zh_refine.json`` and CacheBlend's ``musique_s.json``, anywhere below it.

example: python benchmarks/dataset_times.py --data DIR --out results.json
"""

import dataclasses
import itertools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from script import Result, run_script

from jaxrag.base.errors import RequestError
from jaxrag.base.options import option, parse_ratios
from jaxrag.cli.output import titled
from jaxrag.measure.evals.datasets.options import DatasetOptions
from jaxrag.measure.evals.datasets.report import tables
from jaxrag.measure.evals.datasets.run import items_of, run
from jaxrag.measure.machine import describe
from jaxrag.measure.zoo import llama, random_named, write_random
from jaxrag.models.text import byte_level

SETS = {"rgb_zh": "zh_refine.json", "cacheblend_musique": "musique_s.json"}
VOCABULARY = 8192
MODEL = llama(
    num_layers=4, model_dim=128, mlp_dim=344, num_heads=4, num_kv_heads=2, head_dim=32,
    vocab_size=VOCABULARY, eos_ids=(2,), max_positions=32_768,
)  # fmt: skip
_TEXTS = 3000  # documents that the tokenizer is trained on


@dataclasses.dataclass(frozen=True)
class TimesOptions:
    """Of this script."""

    data: Path = option(dataclasses.MISSING, "where the data sets' files lie", "DIR")
    methods: tuple[str, ...] = option(
        ("full_attention", "turborag", "fusionrag"), "all answer the same prompts", "NAME,..."
    )
    sets: tuple[str, ...] = option(tuple(SETS), "which", "NAME,...")
    noise: tuple[float, ...] = option(
        (0.4,), "of RGB: shares of documents without the answer", "R,...", parse=parse_ratios
    )
    questions: int | None = option(None, "first ones of each", "N", flag="--num", unset="all")
    keep: Path | None = option(
        None, "where finished questions are kept, to go on from", "DIR", unset="they are not"
    )


def measure(options: TimesOptions) -> Result:
    """Both sets, one after the other."""
    found = {name: _file(options.data, SETS[name]) for name in options.sets}
    asked = {name: _options(options, name, path) for name, path in found.items()}
    with tempfile.TemporaryDirectory(prefix="jaxrag-") as work:
        model = Path(work) / "model"
        model.mkdir()
        write_random(model, MODEL, "float32", seed=5)
        texts = itertools.islice(_texts(asked), _TEXTS)
        settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
        specials = ("<pad>", "<s>", "</s>")
        byte_level.save(byte_level.train(texts, VOCABULARY, specials), model, settings)
        rows = {name: _asked(one, model) for name, one in asked.items()}
    return {
        "benchmark": "dataset_times",
        "model": random_named(MODEL, shape=True),
        "noise": list(options.noise),
        "sets": rows,
        "machine": describe(),
    }


def _file(data: Path, name: str) -> Path:
    found = sorted(data.rglob(name))
    if not found:
        raise RequestError(f"--data {data}: no {name} below it; put the data set's file there")
    return found[0]


def _options(options: TimesOptions, name: str, path: Path) -> DatasetOptions:
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    return DatasetOptions(
        name,
        (str(path),),
        methods=options.methods,
        model="",  # it is not there yet
        number=options.questions,
        noise=options.noise if name.startswith("rgb") else (),
        max_new_tokens=1,
        neighbours="prompt",  # times alone
        scores=False,
        out=None if options.keep is None else str(options.keep / f"{name}.json"),
    )


def _texts(asked: dict[str, DatasetOptions]) -> Iterator[str]:
    """Documents of the sets in turn."""
    of = [[text for item in items_of(it) for _, text in item.documents] for it in asked.values()]
    for texts in itertools.zip_longest(*of):
        yield from (text for text in texts if text is not None)


def _asked(options: DatasetOptions, model: Path) -> dict[str, Any]:
    """One set."""
    found = run(dataclasses.replace(options, model=str(model)))
    found["files"] = {Path(path).name: digest for path, digest in found["files"].items()}
    return found


def report(result: Result) -> Iterator[str]:
    """A table a set."""
    for found in result["sets"].values():
        yield from titled(tables(found))


def markdown(result: Result) -> str:
    """The same as a page."""
    return "\n".join(table.markdown() for it in result["sets"].values() for table in tables(it))


if __name__ == "__main__":
    sys.exit(run_script(__doc__, TimesOptions, measure, report, markdown=markdown))
