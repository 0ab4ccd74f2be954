"""The programs that requests need, compiled several at a time before anybody waits for them."""

from collections.abc import Hashable, Iterable

from jax.stages import Lowered

from jaxrag.base.shapes import pieces
from jaxrag.engine.decoding import Lane, sample_first, sampling_rows
from jaxrag.engine.mapping import map_sequence, sequence_of
from jaxrag.engine.prefill import PREFILL_TOKENS, Prefill
from jaxrag.engine.prefill_queue import rows_together
from jaxrag.engine.request import Request
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.staging import lower_place
from jaxrag.engine.state import EngineSettings
from jaxrag.kv.cache import CachedChunk, table_width
from jaxrag.models.compiled import compile_beside


def compile_for(runner: ModelRunner, settings: EngineSettings, requests: Iterable[Request]) -> int:
    """Compile prefill, placing and dense decoding for requests of these shapes; how many programs.

    Nothing of a model with KV in host memory, whose programs are small and many.

    They are traced one after the other and compiled side by side. Nothing is run, and the pool is
    left as it is. What selectors, encoders and sparse rules need beside is compiled when it is
    first run. For the engine's thread.
    """
    if runner.cache.host is not None:
        return 0
    lowered: dict[Hashable, Lowered] = {}
    for request in (it.over(runner.model.batch_ways) for it in requests):
        sequence = sequence_of(runner.model, request)
        need = sequence.need(lambda key: False)
        sequence.own = (0,) * need.own
        nowhere = {key: CachedChunk((0,) * pages, 0) for key, pages in need.chunks.items()}
        map_sequence(sequence, nowhere)
        rule, lane = request.method.decode, sequence.lane
        widths = [width for _, width in pieces(len(sequence.run.ids), PREFILL_TOKENS)]
        rows = rows_together(runner, settings, request, widths)
        prefill = Prefill(runner, [sequence], None if lane is None else rule.observe, rows)
        for (name, width), program in prefill.lower().items():
            lowered.setdefault(
                (rows, table_width(sequence.table), lane is None or rule, name, width), program
            )
        if ("first", rows) not in lowered:
            sampling = sampling_rows([sequence] * rows, rows)
            lowered["first", rows] = sample_first.lower(prefill.prefilled.logits, sampling)
        if need.chunks and "place" not in lowered:
            lowered["place"] = lower_place(runner)
        if lane is not None and not rule.sparse and lane not in lowered:
            lowered[lane] = Lane(runner, lane).lower()
    for compiled in compile_beside(lowered.values()):
        compiled.result()
    return len(lowered)
