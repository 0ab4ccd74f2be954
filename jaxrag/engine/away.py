"""What a request carries from its first decode step on, wherever its K and V are."""

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jaxrag.base.shapes import bucket
from jaxrag.engine.decoding import OnPool, start_decoding
from jaxrag.engine.mapping import carried_chunks
from jaxrag.engine.request import FEWEST_ROOM, BatchKey
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.sequence import Sequence
from jaxrag.kv.cache.host_pool import rows_of
from jaxrag.models.shares import with_heads
from jaxrag.reuse.decode import DecodeRule, Decoding, PromptQueries
from jaxrag.reuse.decode.away import host_layers, pattern_of
from jaxrag.reuse.decode.far import HostPrompt


def start_row(
    runner: ModelRunner,
    key: BatchKey,
    sequence: Sequence,
    bank: PromptQueries,
    number: int | None = None,
    on_pool: OnPool | None = None,
) -> Decoding | None:
    """What one prefilled request carries from step to step, wherever its K and V are.

    Args as those of ``start_decoding``; ``number`` is None where ``runner.searches`` is.
    """
    if runner.model.placement.away:
        assert number is not None
        room = bucket(sequence.request.room, FEWEST_ROOM)
        return start_away(runner, sequence, key.rule, bank, room, number)
    return start_decoding(runner, sequence, key.rule, bank, key.room, number, on_pool)


def start_away(
    runner: ModelRunner,
    sequence: Sequence,
    rule: DecodeRule,
    bank: PromptQueries,
    room: int,
    number: int,
) -> Decoding:
    """The same of one whose K and V are in host memory, and what the host searches for it.

    Args:
      runner: the model on its device.
      bank: the queries that the rule asked prefill for, on the host.
      number: of the request in ``runner.host_search``.
    """
    model, host, window = runner.model, runner.cache.host, rule.static_pattern
    assert host is not None and window is not None
    pages, offsets, slot_position = sequence.table.rows(len(sequence.table.pages))
    slot_position[sequence.run.slots] = sequence.run.positions
    layers = host_layers(
        host, pages, offsets, slot_position, sequence.next_position, sequence.next_slot, room
    )
    search, position = runner.host_search, sequence.next_position - 1
    positions = np.asarray(bank.positions[0])
    there = positions >= 0
    rows = rows_of(pages)
    carried = [
        dataclasses.replace(chunk, slots=rows[chunk.slots].astype(np.int32))
        for chunk in carried_chunks(sequence)
    ]
    parts = search.parts
    sinks = None if bank.sink_logits is None else np.asarray(bank.sink_logits, np.float32)
    config = with_heads(model.config, parts * search.share.ways)
    # Those that attend for other requests are not taken.
    with ThreadPoolExecutor(os.cpu_count(), "index") as builders:
        for part in range(parts):
            held, asked = (
                slice(part * heads, (part + 1) * heads)
                for heads in (config.num_kv_heads, config.num_heads)
            )
            mine = [dataclasses.replace(it, k=it.k[held], v=it.v[held]) for it in layers]
            far = [
                rule.far(
                    HostPrompt(
                        config=config.of_layer(index),
                        layer=layer,
                        index=index,
                        position=position,
                        room=room,
                        queries=np.asarray(bank.queries[index, 0][there, asked], np.float32),
                        positions=positions[there],
                        threads=builders,
                        carried=carried,
                        documents=search.documents,
                        part=part,
                        parts=parts,
                        sink_logits=None if sinks is None else sinks[index, asked],
                    )
                )
                for index, layer in enumerate(mine)
            ]
            search.begin(number, far, mine, part)
    pattern = pattern_of(model.config, window, layers, position, number)
    if model.mesh is not None:
        pattern = pattern.replace(
            numbers=model.put(np.asarray(pattern.numbers)),
            k=model.put_heads(np.asarray(pattern.k), 3),
            v=model.put_heads(np.asarray(pattern.v), 3),
        )
    return Decoding(order=None, state=pattern)
