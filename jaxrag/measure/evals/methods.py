"""How well methods of reuse answer, at one recompute ratio after the other: `jaxrag eval methods`.

Every method answers the same questions of the synthetic task from cached chunks, as ``generate``
does, and is compared with full attention and with full reuse (FusionRAG section 5.2). The chunks of
all samples stand in one knowledge base; the neighbours that a chunk is encoded behind are found in
it by BM25, so they come from other samples as well as its own. With ``retrieve`` the chunks
of a prompt come from a search (``methods_pool``).
"""

import contextlib
import dataclasses
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxrag.base.types import HostArray
from jaxrag.measure.evals.gate import answered
from jaxrag.measure.evals.methods_grid import REFERENCES, MethodCell, cells_of
from jaxrag.measure.evals.methods_pool import Pool, open_pool
from jaxrag.measure.evals.metrics import exact_match, token_f1
from jaxrag.measure.evals.options import MethodsOptions
from jaxrag.measure.evals.scoring import draw, write
from jaxrag.measure.evals.statistics import by_group, plain, recovery, share
from jaxrag.measure.evals.synthetic import AskedSamples, Cell, result_of
from jaxrag.measure.subject import described
from jaxrag.models.model import load_model
from jaxrag.models.text.progress import progress_bar
from jaxrag.reuse.methods import Method
from jaxrag.serve.answers import Result


@dataclasses.dataclass(frozen=True)
class Answers:
    """What one served method answered; arrays [Q], in the order of the questions."""

    results: list[Result]
    exact_match: HostArray  # bool
    f1: HostArray  # float64


def run(options: MethodsOptions, progress: bool = True) -> dict[str, Any]:
    """Measure; JSON-able, shares as fractions of 1, ``synthetic_report`` prints it.

    Raises RequestError, ModelError, TokenizerError or ConfigError for a model that cannot be asked,
    before anything is encoded.
    """
    grid = cells_of(options)
    asked = AskedSamples.of(draw(options.task, options.seed, options.questions))
    model = load_model(options.model, dtype=options.dtype)
    written = write(model, asked.samples, options.template, options.retrieve)
    longest = written.prompt_tokens(options.retrieve) + written.answer_tokens
    room = 4 * options.batch_size * longest  # pages are not full, and cacheblend has copies
    model = dataclasses.replace(model, cache_tokens=room)
    written = dataclasses.replace(written, model=model)
    for one in grid:
        one.method.check(model.config)
    answers: dict[Method, Answers] = {}
    distinct = {one.served: one.method for one in grid}
    with tempfile.TemporaryDirectory() as folder:
        pool = open_pool(options, written, list(distinct.values()), folder, progress)
        with contextlib.ExitStack() as stack:
            for kb in pool.kbs:
                stack.enter_context(kb)
            total = len(distinct) * len(asked.kind)
            bar = progress_bar(total, "eval", "question", shown=progress)
            stack.enter_context(bar)
            for served, method in distinct.items():
                bar.set_postfix_str(
                    f"{method.name} {method.encoder} {method.recompute_ratio}", refresh=False
                )
                answers[served] = _answer(pool, method, options.batch_size, bar)
    cells = [_cell(one, asked, answers) for one in grid]
    return {
        **result_of(options, asked, cells, ((cell, cells[0]) for cell in cells[1:])),
        "model": described(options.model, model, written.template),
        "neighbours": options.neighbours,
        "retrieve": options.retrieve,
        "encoders": list(options.encoders),
        "ratios": list(options.ratios),
    }


def _answer(pool: Pool, method: Method, batch_size: int, bar: "tqdm[Any]") -> Answers:
    results: list[Result] = []
    for _, questions in pool.asked(method):
        results += answered(questions, batch_size, bar.update)
    golds = [q.answer for sample in pool.written.samples for q in sample.questions]
    both = list(zip((result.text for result in results), golds, strict=True))
    return Answers(
        results=results,
        exact_match=np.array([exact_match(text, [gold]) for text, gold in both], np.bool_),
        f1=np.array([token_f1(text, [gold]) for text, gold in both], np.float64),
    )


def _cell(cell: MethodCell, asked: AskedSamples, answers: Mapping[Method, Answers]) -> Cell:
    own = answers[cell.served]
    full, reuse = (answers[reference.served] for reference in REFERENCES)
    counts = [result.counts for result in own.results]
    total = sum(sum(each.values()) for each in counts)
    same = [a.token_ids == b.token_ids for a, b in zip(own.results, full.results, strict=True)]
    three = (reuse.f1, own.f1, full.f1)
    more = {  # FusionRAG's equation 11: 0 is full reuse, 1 full attention
        "normalised_f1": by_group(asked.groups(), asked.sample, recovery, *three),
        "as_full_attention": plain(share(np.array(same, np.bool_), asked.sample)),
        "recomputed": sum(each["recomputed"] for each in counts) / total,
        "recomputed_tokens": sum(each["recomputed"] for each in counts) / len(counts),
        "encoded_tokens": sum(each["encoded"] for each in counts),
        "flops": float(np.mean([result.flops for result in own.results])),
    }
    labels = {"method": cell.name, "encoder": cell.method.encoder, "ratio": cell.ratio}
    return Cell(labels, {"exact_match": own.exact_match, "f1": own.f1}, more)
