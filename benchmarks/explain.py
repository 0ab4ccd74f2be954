"""Why reuse works for a question, or does not: three diagnostics of one prompt, as numbers.

For the chunks that a knowledge base finds for a question: how far their stored KV stands from what
full attention computes (FusionRAG Fig. 3), which tokens each selector would compute again
(FusionRAG Fig. 8), and where the question looks when the chunks see each other and when they do not
(TurboRAG Fig. 2). ``explain_plots`` draws the numbers.

example: python benchmarks/explain.py --kb kb --question "Who built the bridge?" --out pictures
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from explain_plots import check_folder, draw
from tqdm import tqdm

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import RequestError
from jaxrag.base.types import FINAL, Array, HostArray, Tokens
from jaxrag.cli import run_command
from jaxrag.cli.opening import open_kb, where_of
from jaxrag.cli.options import add_found, add_json, add_model, add_secret
from jaxrag.cli.output import give_out
from jaxrag.engine.direct import map_request, unmap
from jaxrag.engine.engine import engine_of
from jaxrag.engine.mapping import RequestState
from jaxrag.engine.outcome import notes_on_missed
from jaxrag.engine.request import Prompt
from jaxrag.engine.runner import ModelRunner
from jaxrag.measure.machine import describe
from jaxrag.models.attention import PackedAttend
from jaxrag.models.decoder import forward
from jaxrag.models.model import Model
from jaxrag.models.rope import RopeTable, place
from jaxrag.models.segments import lay_out
from jaxrag.models.spec import Params
from jaxrag.models.text.progress import progress_bar
from jaxrag.reuse.methods import Method, method_named
from jaxrag.reuse.select import (
    CacheCraft,
    FirstK,
    KvDeviation,
    QueryGuided,
    RandomTokens,
    SelectionInput,
    Selector,
    choose,
    layer_deviations,
)
from jaxrag.serve.ask import Ask
from jaxrag.serve.questions import ReadyQuestion, Settings, prepare, resolve

DEFAULT_RATIO = 0.15  # of methods that recompute nothing, or have a number of their own
BINS = 10  # parts of a chunk, for where in it tokens are chosen

# The selectors that are compared, with what the pictures call them.
COMPARED: dict[str, Selector] = {
    "query_guided": QueryGuided(),
    "query_guided, over cache": QueryGuided(over="cache"),
    "kv_deviation": KvDeviation(),
    "cache_craft": CacheCraft(),
    "first_k": FirstK(),
    "random": RandomTokens(),
}
_STEPS = ("load", "deviation", *COMPARED, "attention")


def method_to_explain(method: str | Method, ratio: float | None) -> Method:
    """The method's chunk KV, as a method whose tokens any selector may choose at a ratio.

    ``ratio`` None is the method's own where it has one that leaves something to choose, else
    DEFAULT_RATIO. Raises RequestError where nothing is reused or nothing is left to choose.
    """
    method = method_named(method)
    if method.encoder is None:
        raise RequestError(
            f"method {method.name!r} reuses nothing that could be explained; choose one that does, "
            f"such as fusionrag or turborag"
        )
    if method.positions == "composite":
        raise RequestError(
            f"method {method.name!r}: tokens are compared and chosen by their place in the prompt, "
            f"and composite positions overlap; choose turborag"
        )
    if ratio is None:
        own = method.recompute_ratio
        ratio = own if own is not None and 0 < own < 1 else DEFAULT_RATIO
    if not 0 < ratio < 1:
        raise RequestError(
            f"recompute_ratio={ratio}: expected a number between 0 and 1, such as 0.15; at 0 and 1 "
            f"there is nothing to choose"
        )
    return dataclasses.replace(
        method,
        selector=RandomTokens(),
        recompute_ratio=ratio,
        misses="encode",
        prefix_cache=False,
    )


def explain(settings: Settings, question: ReadyQuestion) -> dict[str, Any]:
    """The three diagnostics of one question, JSON-able; nothing is generated.

    ``settings.method`` comes from ``method_to_explain``. Chunk tokens are counted through all
    chunks in prompt order. Chunk KV that is not stored yet is encoded, stored and named in the
    notes, as it is for an answer. Raises RequestError for a prompt without chunks.
    """
    if not question.request.prompt.chunks:
        raise RequestError("no chunk was found for the question: there is nothing to explain")
    return engine_of(settings.model).call(lambda runner: _explained(runner, settings, question))


def _explained(runner: ModelRunner, settings: Settings, question: ReadyQuestion) -> dict[str, Any]:
    model, request = runner.model, question.request
    prompt = request.prompt
    lengths = [len(chunk) for chunk in prompt.chunks]
    ratio = settings.method.recompute_ratio
    room = max(selector.room(lengths, ratio) for selector in COMPARED.values())
    with progress_bar(len(_STEPS), "explain", "step") as bar:
        mapped: RequestState | None = None
        try:
            mapped = map_request(runner, request, room)
            bar.update()
            scene = mapped.scene
            assert scene is not None
            deviation = _deviation(runner, scene)
            bar.update()
            selection = _selection(runner, scene, bar)
        finally:
            if mapped is not None:
                unmap(runner, mapped)
        attention = {
            name: _attention(model, prompt, independent=name == "independent")
            for name in ("full", "independent")
        }
        bar.update()
    places = zip(question.sources, lengths, scene.exact, strict=True)
    return {
        "benchmark": "explain",
        "method": settings.method.name,
        "recompute_ratio": ratio,
        "template": settings.template.name,
        "model": {"digest": model.digest, "layers": model.config.num_layers},
        "prompt_tokens": {
            "prefix": len(prompt.prefix),
            "chunks": sum(lengths),
            "final": len(prompt.final),
        },
        "chunks": [
            {
                "document_id": source.document_id,
                "chunk_index": source.chunk_index,
                "encoder": settings.method.encoder_of(index),
                "tokens": length,
                "exact": exact,
                "text": source.text,
            }
            for index, (source, length, exact) in enumerate(places)
        ],
        "deviation": deviation,
        "selection": selection,
        "attention": attention,
        "notes": [*question.notes, *notes_on_missed(mapped)],
        "machine": describe(),
    }


def _deviation(runner: ModelRunner, scene: SelectionInput) -> dict[str, Any]:
    """Deviation per token and layer, its means, and what the best choice would leave of it."""
    k, v = layer_deviations(runner.model, runner.cache, scene)
    assert scene.ratio is not None
    return {
        "k": _rounded(k),
        "v": _rounded(v),
        "mean_by_layer": {"k": _rounded(k.mean(1)), "v": _rounded(v.mean(1))},
        "left_by_layer": left_by_layer(k + v, scene.budget),
    }


def left_by_layer(deviation: HostArray, budget: int) -> list[float | None]:
    """Share of each layer's deviation [L, C] outside its ``budget`` largest tokens.

    What is left when an oracle chooses the tokens to recompute (FusionRAG Fig. 3a). None in layer
    0, whose KV depends on no context, and where nothing deviates.
    """
    left: list[float | None] = []
    for layer, row in enumerate(deviation.astype(np.float64)):
        falling = np.sort(row)[::-1]
        total = falling.sum()
        kept = layer > 0 and total > 0
        left.append(float(f"{falling[budget:].sum() / total:.6g}") if kept else None)
    return left


def _selection(runner: ModelRunner, scene: SelectionInput, bar: "tqdm[Any]") -> dict[str, Any]:
    """What every selector chooses among the same stored KV at the same ratio."""
    chosen, refused = [], []
    for label, selector in COMPARED.items():
        try:
            selector.check(runner.model.config)
        except RequestError as error:
            refused.append({"selector": label, "why": str(error)})
        else:
            [choice] = choose(runner.model, runner.cache, selector, [scene])
            chosen.append(
                {
                    "selector": label,
                    "settings": dataclasses.asdict(selector),
                    "flops": choice.flops,
                    "tokens": choice.tokens.tolist(),
                    **distribution(choice.tokens, scene.lengths),
                }
            )
        bar.update()
    return {"budget": scene.budget, "selectors": chosen, "refused": refused}


def distribution(tokens: HostArray, lengths: Sequence[int]) -> dict[str, list[Any]]:
    """Where chosen chunk tokens [R] lie.

    ``by_chunk``: how many in every chunk; ``share_of_chunk``: of the chunk's tokens;
    ``within_chunk``: how many in every tenth of the chunks, from their first tokens to their last.
    """
    starts = np.concatenate(([0], np.cumsum(lengths)))
    chunk = np.searchsorted(starts, tokens, side="right") - 1
    by_chunk = np.bincount(chunk, minlength=len(lengths))
    tenth = (tokens - starts[chunk]) * BINS // np.array(lengths)[chunk]
    return {
        "by_chunk": by_chunk.tolist(),
        "share_of_chunk": _rounded(by_chunk / np.array(lengths)),
        "within_chunk": np.bincount(tenth, minlength=BINS).tolist(),
    }


def _attention(model: Model, prompt: Prompt, independent: bool) -> dict[str, Any]:
    """Where the final block looks: [L] by part of the prompt, and per chunk token."""
    lengths = [len(chunk) for chunk in prompt.chunks]
    shares = question_attention(model, prompt, independent)  # [L, T]
    first = len(prompt.prefix)
    last = first + sum(lengths)
    starts = np.cumsum([0, *lengths[:-1]])
    return {
        "tokens": _rounded(shares[:, first:last].mean(0)),
        "chunks": _rounded(np.add.reduceat(shares[:, first:last], starts, axis=1)),
        "prefix": _rounded(shares[:, :first].sum(1)),
        "final": _rounded(shares[:, last:].sum(1)),
    }


def question_attention(model: Model, prompt: Prompt, independent: bool) -> HostArray:
    """Share of the final block's attention that falls on every prompt token: [L, T] float64.

    Mean over the final block's tokens and over the heads; every layer adds up to 1.

    Args:
      model: the model.
      prompt: T tokens, the final block included.
      independent: chunks see only themselves (TurboRAG Fig. 2c); else all that precedes them.
        Positions are reordered in either case.
    """
    whole = np.concatenate((prompt.prefix, *prompt.chunks, prompt.final))
    lengths = [len(chunk) for chunk in prompt.chunks]
    layout = lay_out(len(prompt.prefix), lengths, len(prompt.final))
    segments = layout.segments if independent else np.full_like(layout.segments, FINAL)
    shares = _question_attention(
        model.params,
        model.config,
        model.rope(len(whole)),
        *(model.put_batch(x[None], 1) for x in (whole, layout.positions, segments)),
        len(prompt.final),
    )
    return np.asarray(shares, np.float64)[:, 0]


@functools.partial(jax.jit, static_argnames=("config", "num_final"))
def _question_attention(
    params: Params,
    config: ModelConfig,
    rope: RopeTable,
    ids: Array,
    positions: Array,
    segments: Array,
    num_final: int,
) -> Array:
    """[L, B, T] of packed prompts without padding."""
    tokens = Tokens(ids=ids, positions=positions, segments=segments)
    _, _, shares = forward(params, config, tokens, None, _Watch(config, rope, num_final))
    return shares


@dataclasses.dataclass(frozen=True)
class _Watch:
    """Packed attention that collects where the last ``num_final`` tokens of each row look: [B, T].

    These must be the final block: they see everything before them.
    """

    config: ModelConfig
    rope: RopeTable
    num_final: int

    def __call__(
        self,
        layer: Array,
        window: Array | int | None,
        q: Array,
        k: Array,
        v: Array,
        tokens: Tokens,
        cache: None,
    ) -> tuple[Array, None, Array]:
        """Attend, and average the softmax of the final block's scores."""
        packed = PackedAttend(self.config, self.rope, prefix_visible=False)
        out, _, _ = packed(layer, window, q, k, v, tokens, None)
        length, count = k.shape[1], self.num_final
        at = tokens.positions
        keys = place(k, at, self.rope, self.config.rope).astype(jnp.float32)
        asking = place(q[:, -count:], at[:, -count:], self.rope, self.config.rope)
        asking = asking.astype(jnp.float32).reshape(*asking.shape[:2], k.shape[2], -1, k.shape[3])
        scores = jnp.einsum("btkgh,bskh->bkgts", asking, keys) * self.config.head_dim**-0.5
        before = jnp.arange(length - count, length)[:, None] - jnp.arange(length)
        see = before >= 0 if window is None else (before >= 0) & (before < window)
        shares = jax.nn.softmax(jnp.where(see, scores, -jnp.inf), axis=-1)
        return out, None, shares.mean((1, 2, 3))


def _rounded(values: HostArray) -> Any:
    """Nested lists of floats with six significant digits."""
    if values.ndim > 1:
        return [_rounded(row) for row in values]
    return [float(f"{value:.6g}") for value in values]


def report(result: dict[str, Any]) -> list[str]:
    """The result in lines: chunks with the attention they get, layers, selectors, notes."""
    attention, layers = result["attention"], result["model"]["layers"]
    sums = {name: np.array(it["chunks"]).mean(0) for name, it in attention.items()}
    lines = [
        f"{result['method']}: {sum(result['prompt_tokens'].values())} prompt tokens, "
        f"{len(result['chunks'])} chunks; the question's attention, mean of {layers} layers",
        f"{'chunk':>5} {'tokens':>6} {'full':>7} {'independent':>11}  source",
    ]
    for index, chunk in enumerate(result["chunks"]):
        exact = ", exact" if chunk["exact"] else ""
        lines.append(
            f"{index:>5} {chunk['tokens']:>6} {100 * sums['full'][index]:>6.1f}% "
            f"{100 * sums['independent'][index]:>10.1f}%  {chunk['document_id']} "
            f"#{chunk['chunk_index']} ({chunk['encoder']}{exact})"
        )
    deviation = result["deviation"]
    lines += ["", f"{'layer':>5} {'K deviation':>12} {'V deviation':>12} {'left':>7}"]
    for layer, left in enumerate(deviation["left_by_layer"]):
        k, v = (deviation["mean_by_layer"][part][layer] for part in ("k", "v"))
        shown = "" if left is None else f"{100 * left:.1f}%"
        lines.append(f"{layer:>5} {k:>12.4g} {v:>12.4g} {shown:>7}")
    selection = result["selection"]
    lines += [
        f"left: after recomputing the {selection['budget']} tokens of that layer that deviate most",
        "",
        "tokens chosen in each chunk",
    ]
    for it in selection["selectors"]:
        lines.append(f"{it['selector']:>25}  {'  '.join(map(str, it['by_chunk']))}")
    lines += [f"note: {it['selector']} was left out: {it['why']}" for it in selection["refused"]]
    return lines + [f"note: {note}" for note in result["notes"]]


def main(argv: Sequence[str] | None = None) -> int:
    """Explain one question; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kb", required=True, metavar="DIR", help="where chunks come from")
    add_secret(parser)
    parser.add_argument("--question", required=True, metavar="TEXT", help="the question, as text")
    add_model(parser)
    parser.add_argument(
        "--method",
        default="fusionrag",
        metavar="NAME",
        help="whose stored KV is looked at (fusionrag)",
    )
    parser.add_argument(
        "--recompute-ratio",
        type=float,
        metavar="R",
        help="share of the chunk tokens that selectors choose (the method's own, or 0.15)",
    )
    parser.add_argument(
        "--template", metavar="NAME", help="a template's name or .toml file (that of --kb)"
    )
    add_found(parser)
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="folder for the pictures and explain.json"
    )
    add_json(parser)
    return run_command(run, parser.parse_args(argv))


def run(args: argparse.Namespace) -> None:
    """Write the pictures and the numbers; print a summary, or one JSON object."""
    folder, where = Path(args.out), where_of(args)
    method = method_to_explain(args.method, args.recompute_ratio)
    check_folder(folder)
    with open_kb(args) as kb:
        settings = resolve(
            Ask(method=method, template=args.template, k=args.k, max_new_tokens=1, where=where),
            kb=kb,
        )
        question = prepare(settings, args.question)
        result = {"question": args.question, **explain(settings, question)}
    pictures = draw(result, folder)
    args.out = folder / "explain.json"
    give_out(args, result, [*report(result), "", *[f"wrote {path}" for path in pictures]])


if __name__ == "__main__":
    sys.exit(main())
