"""Vectors in the files of version 0.1.0: read as they were, and moved into a table."""

import json
import os
import shutil
import struct

import numpy as np
import pytest
import xxhash

from jaxrag.base.errors import StoreError
from jaxrag.library.retrieve import earlier
from jaxrag.library.retrieve.lance import VectorIndex

DIM = 4
HELD = [0, 1, 3, 4, 5, 6, 7]
FILES = ["0.ivf", "0.log", "0.vectors", "lock", "rows.json"]


def frame(count, ids, rows=None):
    digest = xxhash.xxh3_64(np.array(ids, "<i8").tobytes())
    if rows is not None:
        digest.update(rows.tobytes())
    start = struct.pack("<qQ", count, digest.intdigest())
    return (
        start + struct.pack("<Q", xxhash.xxh3_64_intdigest(start)) + np.array(ids, "<i8").tobytes()
    )


def rows_of(ids):
    """Vectors whose every value is their id."""
    return np.repeat(np.array(ids, "<f4")[:, None], DIM, axis=1)


@pytest.fixture
def folder(tmp_path):
    """Ids 0-4 and 5-7 without 2: three frames."""
    folder = tmp_path / "v"
    folder.mkdir()
    first, second = range(5), range(5, 8)
    frames = [frame(5, first, rows_of(first)), frame(3, second, rows_of(second)), frame(-1, [2])]
    (folder / "0.log").write_bytes(b"".join(frames))
    (folder / "0.vectors").write_bytes(rows_of([*first, *second]).tobytes())
    (folder / "0.ivf").write_bytes(b"of FAISS")
    (folder / "lock").touch()
    (folder / "rows.json").write_text(json.dumps({"dim": DIM, "format": 1, "generation": 0}))
    return folder


def held(folder):
    """The ids that count, after a check that each has its vector."""
    ids, vectors = earlier.read(folder, DIM)
    assert (vectors == ids[:, None]).all()
    return sorted(ids.tolist())


def same(index, ids):
    assert index.ids().tolist() == ids
    assert (index.get(np.array(ids)) == rows_of(ids)).all()
    best = sorted(ids, reverse=True)[:3]
    assert index.search(np.ones((1, DIM), np.float32), 3)[0].tolist() == [best]


def test_frames_add_up(folder):
    assert held(folder) == HELD


def test_a_log_cut_anywhere_holds_its_whole_frames(folder):
    data = (folder / "0.log").read_bytes()
    ends = [24 + 40, 24 + 40 + 24 + 24, len(data)]
    assert len(data) == ends[1] + 24 + 8
    states = [[], [0, 1, 2, 3, 4], list(range(8)), HELD]
    for length in range(0, len(data), 3):
        (folder / "0.log").write_bytes(data[:length])
        assert held(folder) == states[sum(length >= end for end in ends)], length


@pytest.mark.parametrize(
    "garbage", [bytes(64), b"\xff" * 61, bytes(range(7, 250, 5))], ids=["zeros", "ones", "mixed"]
)
def test_what_is_behind_the_last_frame_does_not_count(folder, garbage):
    for name in ("0.log", "0.vectors"):
        with open(folder / name, "ab") as file:
            file.write(garbage)
    assert held(folder) == HELD


@pytest.mark.parametrize("mode", ["r", "rw"])
@pytest.mark.parametrize(("name", "place"), [("0.log", 0), ("0.log", 30), ("0.vectors", 5)])
def test_a_flipped_bit_before_the_last_frame_is_refused(folder, name, place, mode):
    data = bytearray((folder / name).read_bytes())
    data[place] ^= 4
    (folder / name).write_bytes(data)
    with pytest.raises(StoreError, match="do not match their digests at byte 0; remove"):
        VectorIndex.open(folder, DIM, mode=mode)
    assert (folder / "rows.json").is_file()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged"),
        ('{"dim": 4}', "is damaged"),
        ('{"dim": 4, "format": 9, "generation": 0}', "has format 9, this version reads format 1"),
        ('{"dim": 5, "format": 1, "generation": 0}', "vectors of 5 values, asked for 4"),
        ('{"dim": 4, "format": 1, "generation": 1}', "lacks 1.log; restore the folder"),
    ],
)
def test_other_files_are_refused(folder, text, message):
    (folder / "rows.json").write_text(text)
    for mode in ("r", "rw"):
        with pytest.raises(StoreError, match=message):
            VectorIndex.open(folder, DIM, mode=mode)


@pytest.mark.parametrize("kind", ["exact", "faiss"])
def test_a_reader_leaves_the_files_and_a_writer_moves_them(folder, kind):
    reader = VectorIndex.open(folder, DIM, kind, mode="r")
    same(reader, HELD)
    with pytest.raises(StoreError, match="opened for reading"):
        reader.remove(np.array([1]))
    assert sorted(os.listdir(folder)) == FILES
    writer = VectorIndex.open(folder, DIM, kind)
    same(writer, HELD)
    assert sorted(os.listdir(folder)) == ["chunks.lance", "lock"]
    writer.add(np.array([9]), rows_of([9]))
    same(reader, [*HELD, 9])
    same(VectorIndex.open(folder, DIM, kind, mode="r"), [*HELD, 9])


def test_rows_that_were_moved_have_digests(folder):
    vector = rows_of([3]).tobytes()
    VectorIndex.open(folder, DIM).close()
    [file] = [it for it in folder.rglob("*.lance") if it.is_file() and vector in it.read_bytes()]
    data = bytearray(file.read_bytes())
    data[data.index(vector)] ^= 1
    file.write_bytes(data)
    with pytest.raises(StoreError, match="rows differ from their digests"):
        VectorIndex.open(folder, DIM, mode="r")


class Killed(BaseException):
    """Ends a move where the process would be killed."""


def test_a_move_that_is_killed_at_any_moment_loses_nothing(folder, tmp_path, monkeypatch):
    """Before each call that changes the disk, and so behind the one before."""
    places = [(os, "rename"), (os, "fsync"), (os, "unlink"), (os, "rmdir"), (os, "mkdir")]
    real = [getattr(module, name) for module, name in places]
    steps = 0

    def ends_at(step):
        calls = iter(range(10**6))

        def wrapped(call):
            def run(*arguments, **named):
                if next(calls) == step:
                    raise Killed
                return call(*arguments, **named)

            return run

        for (module, name), call in zip(places, real, strict=True):
            monkeypatch.setattr(module, name, wrapped(call))

    for step in range(100):
        copy = tmp_path / "copy"
        shutil.copytree(folder, copy)
        ends_at(step)
        try:
            VectorIndex.open(copy, DIM)
        except Killed:
            steps += 1
        else:
            assert steps > 10
            return
        finally:
            for (module, name), call in zip(places, real, strict=True):
                monkeypatch.setattr(module, name, call)
        same(VectorIndex.open(copy, DIM, mode="r"), HELD)
        same(VectorIndex.open(copy, DIM), HELD)
        assert sorted(os.listdir(copy)) == ["chunks.lance", "lock"]
        shutil.rmtree(copy)
