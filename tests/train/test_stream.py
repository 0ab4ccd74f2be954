"""Packed steps: masks, targets, ratios, and taking up the data again at any step."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import TrainError
from jaxrag.models.segments import example_ids
from jaxrag.models.text.tokenizer import Tokenizer
from jaxrag.train.packing import CONTEXT, RESPONSE, Packer, lay_piece
from jaxrag.train.samples import Final, TrainSample
from jaxrag.train.stream import Ahead, Position, SampleStream

SAMPLE = TrainSample(
    prefix=np.array([1, 2]),
    chunks=(np.array([3, 4]), np.array([5, 6])),
    finals=(Final(np.array([7]), np.array([8, 9])), Final(np.array([10]), np.array([11]))),
)


def test_block_mode_is_the_picture():
    piece = lay_piece(SAMPLE, full=False, positions="reordered")
    assert piece.ids.tolist() == list(range(1, 12))
    assert piece.segments.tolist() == [1, 1, 3, 3, 4, 4, 2, 2, 2, 2, 2]
    assert piece.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 6, 7]
    assert piece.examples.tolist() == [0] * 6 + [example_ids(0, 1)] * 3 + [example_ids(0, 2)] * 2
    assert piece.kinds.tolist() == [0, 0, 2, 0, 2, 0, 1, 1, 0, 1, 0]
    assert piece.targets.tolist() == [0, 0, 4, 0, 6, 0, 8, 9, 0, 11, 0]
    assert piece.questions == ((6, 8), (9, 10))
    assert piece.spans == ((2, 0), (2, 0), (2, 0), (3, 6), (2, 6))


def test_full_mode_and_composite_positions_differ_in_data_only():
    block = lay_piece(SAMPLE, full=False, positions="composite")
    assert block.positions.tolist() == [0, 1, 0, 1, 0, 1, 6, 7, 8, 6, 7]
    full = lay_piece(SAMPLE, full=True, positions="composite")
    assert full.segments.tolist() == [2] * 11
    assert full.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 6, 7]
    assert full.kinds.tolist() == block.kinds.tolist()
    assert full.spans == ((6, 0), (3, 6), (2, 6))


def test_rows_keep_their_pieces_apart():
    piece = lay_piece(SAMPLE, full=False, positions="reordered")
    packer = Packer(2, 25)
    assert packer.add([piece, piece])
    assert packer.add([piece])
    assert packer.add([piece])
    assert not packer.add([piece])
    assert packer.efficiency == pytest.approx(44 / 50)
    batch = packer.batch()
    assert batch.tokens.ids.shape == (2, 25)
    assert (batch.tokens.examples[0, 11:22] & 0xFFFF).tolist() == [1] * 11
    assert (batch.tokens.segments[:, 22:] == 0).all()
    assert (batch.kinds[:, 22:] == 0).all()
    assert (batch.kinds == RESPONSE).sum() == 4 * 3
    assert (batch.kinds == CONTEXT).sum() == 4 * 2


def rows_of(name, count):
    return [
        {
            "chunks": [f"{name} {n} " + "word " * (n % 7)],
            "question": "q?",
            "answers": [f"{name}{n}"],
        }
        for n in range(count)
    ]


@pytest.fixture
def make_stream(train_config, tokenizer_dir):
    def make(**changes):
        data = train_config(**changes).data
        return SampleStream(data, Tokenizer.load(tokenizer_dir), end_id=2, max_positions=1024)

    return make


@pytest.fixture
def mixture(write_rows):
    return [
        {"name": "a", "weight": 3.0, "paths": [write_rows(rows_of("a", 50), "a.jsonl")]},
        {"name": "b", "weight": 1.0, "paths": [write_rows(rows_of("b", 9), "b.jsonl")],
         "mode": "full"},
    ]  # fmt: skip


def same(a, b):
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def test_mixture_keeps_its_ratio_and_shuffles_every_epoch(make_stream, mixture):
    stream = make_stream(**{"data.sources": mixture})
    steps = list(itertools.islice(stream.steps(stream.start()), 20))
    drawn = steps[-1].position.drawn
    assert abs(drawn[0] - 3 * drawn[1]) <= 4
    assert drawn[1] > 18  # two epochs
    files = stream.sources[1]._origin
    epochs = [[files.row(k)[0] for k in range(9 * e, 9 * e + 9)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]
    assert np.mean([step.efficiency for step in steps]) > 0.9


def test_nothing_is_lost_and_nothing_comes_twice(make_stream, mixture):
    stream = make_stream(**{"data.sources": mixture[:1]})
    steps = list(itertools.islice(stream.steps(stream.start()), 12))
    last = steps[-1].position
    placed = sum(len(step.pieces) for step in steps)
    assert placed + len(last.waiting) == last.drawn[0]
    ids = [tuple(p.ids) for step in steps for p in step.pieces]
    assert max(ids.count(i) for i in set(ids)) <= -(-last.drawn[0] // 50)


def test_taken_up_again_at_any_step(make_stream, mixture):
    """The position is a handful of numbers that survive JSON."""
    first = make_stream(**{"data.sources": mixture, "data.mode": "both"})
    steps = list(itertools.islice(first.steps(first.start()), 8))
    for at in (1, 4, 7):
        position = Position.from_dict(json.loads(json.dumps(steps[at - 1].position.to_dict())))
        assert position == steps[at - 1].position
        again = make_stream(**{"data.sources": mixture, "data.mode": "both"})
        for step in steps[at:]:
            (found,) = itertools.islice(again.steps(position), 1)
            assert same(found.batch, step.batch)
            position = found.position


def test_number_of_samples_of_a_step(make_stream, mixture):
    stream = make_stream(**{"data.sources": mixture, "data.samples": 5})
    steps = list(itertools.islice(stream.steps(stream.start()), 6))
    assert [len(step.pieces) for step in steps] == [5] * 6


def test_both_modes_of_a_sample_share_a_step(make_stream, mixture):
    stream = make_stream(**{"data.sources": mixture[:1], "data.mode": "both"})
    for step in itertools.islice(stream.steps(stream.start()), 3):
        full = sorted(tuple(p.ids) for p in step.pieces if (p.segments == 2).all())
        block = sorted(tuple(p.ids) for p in step.pieces if not (p.segments == 2).all())
        assert full == block
        assert full


def test_block_share_and_texts_that_stay_full(make_stream, write_rows):
    rows = [*rows_of("x", 100), *rows_of("import os", 20)]
    source = {"name": "chat", "paths": [write_rows(rows)], "block_share": 0.45,
              "full_only": ["import os"]}  # fmt: skip
    stream = make_stream(**{"data.sources": [source]})
    modes = [(stream.sources[0].holds(k, ["import os"]), stream.lay(0, k)) for k in range(120)]
    block = [code for code, item in modes if (item.pieces[0].segments != 2).any()]
    assert not any(block)
    assert 30 <= len(block) <= 60


@pytest.mark.parametrize("turns", [1, 2])
def test_a_block_share_is_of_single_turn_samples(make_stream, write_rows, turns):
    asked = [{"role": "user", "content": "one\n\ntwo\n\nthree"}]
    answered = {"role": "assistant", "content": "yes"}
    rows = [{"messages": [*asked, answered] * turns} for _ in range(20)]
    source = {"name": "chat", "paths": [write_rows(rows)], "block_share": 0.0}
    stream = make_stream(**{"data.sources": [source]})
    block = [(stream.lay(0, k).pieces[0].segments != 2).any() for k in range(20)]
    assert block == [turns > 1] * 20


def test_sources_come_and_go(make_stream, mixture):
    mixture[0]["last_step"] = 2
    mixture[1]["first_step"] = 2
    stream = make_stream(**{"data.sources": mixture})
    steps = list(itertools.islice(stream.steps(stream.start()), 4))
    assert [step.position.drawn[1] > 0 for step in steps] == [False, False, True, True]
    assert steps[1].position.drawn[0] == steps[3].position.drawn[0]


def test_parquet_rows_are_those_of_json(make_stream, tmp_path, write_rows):
    import datasets

    rows = rows_of("p", 12)
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_list(rows).to_parquet(str(path))
    streams = [
        make_stream(**{"data.sources": [{"name": "p", "paths": [name]}]})
        for name in (str(path), write_rows(rows))
    ]
    a, b = (next(stream.steps(stream.start())) for stream in streams)
    assert same(a.batch, b.batch)


def test_bad_rows_are_named_by_file_and_line(make_stream, write_rows, caplog):
    rows = rows_of("a", 4)
    rows[2] = '{"chunks": ["cut off'
    rows[1] = {**rows[1], "answers": [""]}
    path = write_rows(rows)
    strict = make_stream(**{"data.sources": [{"name": "s", "paths": [path]}]})
    with refused(TrainError, '"skip"'):
        next(strict.steps(strict.start()))
    source = [{"name": "s", "paths": [path]}]
    lenient = make_stream(**{"data.sources": source, "data.bad_rows": "skip", "data.samples": 4})
    step = next(lenient.steps(lenient.start()))
    assert len(step.pieces) == 4
    assert lenient.sources[0].skipped >= 2
    assert "data.jsonl:3: not JSON" in caplog.text
    assert "data.jsonl:2: the response is empty" in caplog.text


def test_long_samples_are_refused_or_skipped(make_stream, write_rows):
    rows = rows_of("a", 5)
    rows[3] = {**rows[3], "chunks": ["long " * 400]}
    source = [{"name": "s", "paths": [write_rows(rows)]}]
    strict = make_stream(**{"data.sources": source})
    with refused(TrainError, "4"):
        next(strict.steps(strict.start()))
    lenient = make_stream(**{"data.sources": source, "data.too_long": "skip"})
    assert next(lenient.steps(lenient.start())).pieces


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("missing.jsonl", None, ""),
        ("rows.csv", "a,b\n", ""),
        ("empty.jsonl", "", ""),
        ("rows.parquet", "not parquet", ""),
    ],
)
def test_files_that_cannot_be_read(make_stream, tmp_path, name, text, match):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with refused(TrainError, match):
        make_stream(**{"data.sources": [{"name": "s", "paths": [str(path)]}]})


def test_a_missing_file_says_what_makes_it(make_stream):
    source = {"name": "s", "paths": ["nowhere.jsonl"], "made_by": "`jaxrag eval needle`"}
    with refused(TrainError):
        make_stream(**{"data.sources": [source]})


def test_generated_samples(make_stream):
    task = {"chunks": [2, 2], "relations": 2, "questions": 2}
    stream = make_stream(**{"data.sources": [{"name": "made", "synthetic": task}]})
    step = next(stream.steps(stream.start()))
    assert step.pieces
    again = next(stream.steps(stream.start()))
    assert same(step.batch, again.batch)


def test_errors_of_the_thread_reach_the_loop():
    def items():
        yield 1
        raise TrainError("row 2")

    ahead = Ahead(items())
    found = iter(ahead)
    assert next(found) == 1
    with refused(TrainError, "2"):
        next(found)
    ahead.close()


def test_thread_ends_when_nobody_reads():
    ahead = Ahead(itertools.count())
    assert next(iter(ahead)) == 0
    ahead.close()
    assert not ahead._thread.is_alive()


def test_position_is_small(make_stream, mixture):
    stream = make_stream(**{"data.sources": mixture})
    step = next(stream.steps(stream.start()))
    assert len(json.dumps(dataclasses.asdict(step.position))) < 1000
