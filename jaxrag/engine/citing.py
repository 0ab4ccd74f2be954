"""Which chunks of its prompt a model looked at when it chose a token: what citations rest on.

The answer is read once more, some tokens at a time, over the KV that decoding left in the pool.
Every head of every layer votes for chunks with the square of the attention that it gives them, so
that heads that look at one place count, and those that look everywhere do not.
"""

import functools
from collections import abc

import jax
import jax.numpy as jnp
import numpy as np

from jaxrag.base.errors import RequestError
from jaxrag.base.shapes import bucket
from jaxrag.base.types import Array, HostArray, Step
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.sequence import Sequence
from jaxrag.kv.cache import PAGE, PagePool, PageTable
from jaxrag.kv.cache.tables import chunk_pages, table_width
from jaxrag.models.decoder import Decoder, forward
from jaxrag.models.model import Model
from jaxrag.models.taps import PartsAttend

PIECE = 64  # tokens of an answer that are read once more together


def read_again(runner: ModelRunner, sequence: Sequence) -> None:
    """Hand the next piece of an answer to the device; all but its last token were run."""
    so_far, tokens = sequence.attribution, sequence.tokens[: sequence.read]
    end = min(so_far.done + PIECE, len(tokens))
    so_far.pieces.append(_dispatch(runner, sequence, tokens, slice(so_far.done, end)))
    so_far.done = end


def check_cited(model: Model) -> None:
    """RequestError where KV is not on a device of ours, TokenizerError without a tokenizer."""
    if model.backend is not None:
        raise RequestError(f"cite: {model.backend.called} says not where it looked; leave cite out")
    model.text_tokenizer()
    if not model.placement.on_device:
        raise RequestError(
            f"cite: an answer is read once more over K and V on the device, and {model.placement} "
            "keeps some in host memory; leave cite out, or load the model without it"
        )


def slot_chunks(state: Sequence) -> HostArray:
    """[S] int32: which chunk of the prompt each slot of the table holds; -1 for anything else."""
    chunks = np.full(state.table.num_slots, -1, np.int32)
    for part in state.parts:
        chunks[part.slots] = part.chunk
    context = state.run.positions < state.next_position - len(state.request.prompt.final)
    for part in state.parts:  # what was run in its place, or once more
        inside = (state.run.positions >= part.position) & (
            state.run.positions < part.position + len(part.ids)
        )
        chunks[state.run.slots[inside & context]] = part.chunk
    return chunks


def _dispatch(
    runner: ModelRunner, state: Sequence, tokens: abc.Sequence[int], piece: slice
) -> tuple[Array, Array]:
    """Votes and most of the answer's tokens ``piece``, [PIECE, C] on the device.

    Token i was chosen by the query of the one before it, the prompt's last for the first.
    """
    model, count = runner.model, piece.stop - piece.start
    num_pages = table_width(state.table)
    pages, offsets, slot_position = state.table.rows(num_pages)
    slot_position[state.run.slots] = state.run.positions
    run = np.arange(piece.stop - 1)  # tokens whose KV these queries may see
    slot_position[state.next_slot + run] = state.next_position + run
    of = np.full(num_pages * PAGE, -1, np.int32)
    chunks = slot_chunks(state)
    of[: len(chunks)] = chunks
    ids, positions = np.zeros(PIECE, np.int32), np.full(PIECE, -1, np.int32)
    ids[:count] = [int(state.run.ids[-1]), *tokens][piece]
    positions[:count] = state.next_position - 1 + np.arange(piece.start, piece.stop)
    nowhere = np.full(PIECE, num_pages * PAGE, np.int32)

    def put(x: HostArray) -> Array:
        return model.put_batch(x[None], 1)

    apart = jax.tree.map(lambda x: put(x[0]), chunk_pages([state.table], 1, num_pages))
    table = PageTable(put(pages), put(offsets), put(slot_position), apart)
    step = Step(put(ids), put(positions), put(nowhere))
    width = bucket(len(state.request.prompt.chunks))
    found: tuple[Array, Array] = _attribution(
        runner.cache.pool, model.decoder(num_pages * PAGE), table, put(of), step, width
    )
    return found


@functools.partial(jax.jit, static_argnames=("count",))
def _attribution(
    pool: PagePool, decoder: Decoder, table: PageTable, chunks: Array, step: Step, count: int
) -> tuple[Array, Array]:
    """Over all layers: the sum of squared shares, and the largest share, [T, C] each."""
    logits = decoder.params.layers.sink_logits
    attend = PartsAttend(decoder.config, decoder.rope, table, chunks[0], count, _votes, logits)
    _, _, (votes, most) = forward(decoder.params, decoder.config, step.tokens, pool, attend)
    return jnp.sum(votes, 0), jnp.max(most, 0)


def _votes(shares: Array) -> tuple[Array, Array]:
    return jnp.square(shares).sum(1), shares.max(1)
