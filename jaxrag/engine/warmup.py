"""The large programs of a request, traced, to be compiled before anybody waits for them."""

from collections.abc import Hashable

import numpy as np
from jax.stages import Lowered

from jaxrag.base.shapes import pieces
from jaxrag.engine.decoding import DecodeBatch, sample_first, sampling_rows
from jaxrag.engine.mapping import map_sequence, recompute, sequence_of
from jaxrag.engine.prefill import PREFILL_TOKENS, Prefill
from jaxrag.engine.prefill_queue import rows_together
from jaxrag.engine.request import Request
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.sequence import Sequence
from jaxrag.engine.staging import lower_place
from jaxrag.engine.state import EngineSettings
from jaxrag.kv.cache import CachedChunk, table_width
from jaxrag.reuse.select import Selection


def programs_of(
    runner: ModelRunner, settings: EngineSettings, request: Request
) -> dict[Hashable, Lowered]:
    """Programs of prefill, placing and dense decoding for requests of this shape, by shape.

    None of a model with KV in host memory, whose programs are small and many.

    Nothing is compiled or run, and the pool is left as it is. What selectors, encoders and sparse
    rules need beside is compiled when it is first run. For the engine's thread.
    """
    if runner.cache.host is not None:
        return {}
    request = request.over(runner.model.batch_ways)
    sequence = sequence_of(runner.model, request)
    need = sequence.need(lambda key: False)
    sequence.own = (0,) * need.own
    nowhere = {key: CachedChunk((0,) * pages, 0) for key, pages in need.chunks.items()}
    map_sequence(sequence, nowhere)
    _select_any(sequence)
    rule, batch = request.method.decode, sequence.batch
    widths = [width for _, width in pieces(len(sequence.run.ids), PREFILL_TOKENS)]
    rows = rows_together(runner, settings, request, widths)
    prefill = Prefill(runner, [sequence], None if batch is None else rule.observe, rows)
    table, observed = table_width(sequence.table), batch is None or rule
    lowered: dict[Hashable, Lowered] = {
        (rows, table, observed, *which): program for which, program in prefill.lower().items()
    }
    sampling = sampling_rows([sequence] * rows, rows)
    lowered["first", rows] = sample_first.lower(prefill.prefilled.logits, sampling)
    for load in {load.layers: load for load in sequence.loads.values()}.values():
        lowered["place", load.layers] = lower_place(runner, load)
    if batch is not None and not rule.sparse:
        made = DecodeBatch(runner, batch)
        lowered["leave", batch] = made.lower_leave()
        lowered |= {(batch, number): step for number, step in enumerate(made.lower())}
    return lowered


def _select_any(sequence: Sequence) -> None:
    """As many chunk tokens to run as a selector chooses that goes by the method's ratio."""
    if sequence.request.method.recompute_ratio:
        scene = sequence.scene
        recompute(sequence, scene, Selection(np.flatnonzero(scene.candidates)[: scene.budget]))
