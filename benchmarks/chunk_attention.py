"""Where a question looks: the attention that it gives to each passage of its prompt.

A prompt of `jaxrag eval near` is prefilled by full attention and by each method. Then the tokens of
its final block attend once more to what lies in the pool, and what falls on every passage, and on
its first token alone, is averaged over these tokens, the heads, the layers and the prompts.

example: python benchmarks/chunk_attention.py --model MODEL --data nq-open-oracle.jsonl --out FILE
"""

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from script import Result, run_script

from jaxrag.base.options import option, parse_names
from jaxrag.base.shapes import bucket
from jaxrag.base.sharding import to_host
from jaxrag.base.types import Array, HostArray, Step
from jaxrag.engine.citing import slot_chunks
from jaxrag.engine.engine import engine_of
from jaxrag.engine.prefill import Prefilled
from jaxrag.engine.prompt_inspection import inspect_prompts
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.sequence import Sequence
from jaxrag.kv.cache import PagePool, PageTable
from jaxrag.measure.evals.datasets.near import NearStudy, passages_of
from jaxrag.measure.evals.datasets.nearness import FULL
from jaxrag.measure.evals.datasets.options import NearOptions
from jaxrag.measure.evals.datasets.run import items_of
from jaxrag.measure.evals.statistics import bootstrapped
from jaxrag.measure.machine import describe
from jaxrag.measure.subject import described
from jaxrag.models.decoder import Decoder, forward
from jaxrag.models.model import load_model
from jaxrag.models.taps import PartsAttend
from jaxrag.models.text.progress import progress_bar
from jaxrag.serve.questions import prepare


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """What is measured."""

    model: str = option(dataclasses.MISSING, "a directory or a GGUF file", "MODEL")
    data: str = option(dataclasses.MISSING, "NQ-open's oracle file", "FILE")
    number: int = option(20, "first questions of the file", "N", flag="--num")
    passages: int = option(5, "to a question", "N")
    template: str = option("chat", "of the prompt", "NAME")
    methods: tuple[str, ...] = option(
        ("full_reuse", "primed"), "beside full attention", "NAME,...", parse=parse_names
    )
    figure: Path | None = option(None, "also draw it there", "FILE", unset="it is not drawn")
    seed: int = option(7, "of passages that are added, and of resampling", "N")


def run(options: AttentionOptions) -> Result:
    """Shares of attention by place, JSON-able."""
    near = NearOptions(
        "nq_open", (options.data,), model=options.model, number=options.number,
        documents=options.passages, template=options.template, methods=options.methods,
        seed=options.seed,
    )  # fmt: skip
    model = load_model(options.model)
    study = NearStudy.open(near, model)
    found: dict[str, list[HostArray]] = {}
    items = items_of(dataclasses.replace(near, number=None))[: near.number]
    with progress_bar(len(items), "attention", "prompt") as bar:
        for item in items:
            documents = passages_of(item, model, near.chunk_tokens)
            for name, settings in {FULL: study.full, **study.arms}.items():
                ready = prepare(settings, item.question, documents)
                found.setdefault(name, []).extend(inspect_prompts(engine_of(model), [ready], _mass))
            study.store.delete(list(study.store.keys()))
            bar.update(1)
    rows = [
        {
            "method": name,
            "passages": [bootstrapped(x, options.seed) for x in np.stack(shares)[:, 0].T],
            "first_tokens": [bootstrapped(x, options.seed) for x in np.stack(shares)[:, 1].T],
        }
        for name, shares in found.items()
    ]
    if options.figure is not None:
        _draw(rows, options.figure)
    return {
        "dataset": "nq_open",
        "passages": options.passages,
        "prompts": len(items),
        "seed": options.seed,
        "rows": rows,
        "model": described(options.model, model, study.full.template),
        "machine": describe(),
    }


def _mass(runner: ModelRunner, state: Sequence, there: Prefilled) -> HostArray:
    """Of each chunk, and of its first token, the share of the final block's attention: [2, C]."""
    model, final = runner.model, state.request.prompt.final
    num_slots, count = there.table.slot_position.shape[1], len(state.request.prompt.chunks)
    chunks, first = slot_chunks(state), np.full(count, -1)
    for part in (it for it in state.parts if it.chunk >= 0 and len(it.slots)):
        first[part.chunk] = part.slots[0]
    for slot in state.run.slots[np.argsort(-state.run.positions, kind="stable")]:
        if chunks[slot] >= 0:  # the earliest comes last
            first[chunks[slot]] = slot
    parts = np.full(num_slots, -1, np.int32)
    parts[: len(chunks)] = chunks
    parts[first] += count
    width = bucket(len(final))
    ids, positions = np.zeros(width, np.int32), np.full(width, -1, np.int32)
    ids[: len(final)] = final
    positions[: len(final)] = state.next_position - len(final) + np.arange(len(final))
    nowhere = np.full(width, num_slots, np.int32)
    step = Step(*(model.put_batch(x[None], 1) for x in (ids, positions, nowhere)))
    shares = to_host(
        _received(runner.cache.pool, model.decoder(num_slots), there.table, parts, step, 2 * count)
    )
    rest, firsts = shares[: len(final)].mean(0).reshape(2, count)
    return np.stack([rest + firsts, firsts])


@functools.partial(jax.jit, static_argnames=("count",))
def _received(
    pool: PagePool, decoder: Decoder, table: PageTable, parts: Array, step: Step, count: int
) -> Array:
    """Shares of attention, the mean over heads and layers: [T, count]."""
    mean = functools.partial(jnp.mean, axis=1)
    sink_logits = decoder.params.layers.sink_logits
    attend = PartsAttend(decoder.config, decoder.rope, table, parts, count, mean, sink_logits)
    _, _, shares = forward(decoder.params, decoder.config, step.tokens, pool, attend)
    return jnp.mean(shares, 0)


def _draw(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(8, 3), dpi=110, layout="constrained")
    panels = drawn.subplots(1, 2)
    titles = {"passages": "attention to the passage", "first_tokens": "to its first token"}
    for panel, (part, title) in zip(panels, titles.items(), strict=True):
        for row in rows:
            shares = 100 * np.array([[it[k] for k in ("value", "low", "high")] for it in row[part]])
            at = np.arange(1, len(shares) + 1)
            panel.plot(at, shares[:, 0], marker="o", label=row["method"])
            panel.fill_between(at, shares[:, 1], shares[:, 2], alpha=0.2)
        panel.set(title=title, xlabel="place of the passage", ylabel="%", ylim=(0, None), xticks=at)
    panels[0].legend()
    drawn.savefig(path)


def report(result: Result) -> list[str]:
    """A line for each method."""
    return [
        f"{row['method']:24} "
        + "  ".join(f"{100 * it['value']:5.1f}" for it in row["passages"])
        + "   first tokens "
        + "  ".join(f"{100 * it['value']:5.2f}" for it in row["first_tokens"])
        for row in result["rows"]
    ]


if __name__ == "__main__":
    sys.exit(run_script(__doc__, AttentionOptions, run, report))
