"""Ids of found rows, which are held in memory: rows that come, leave, move, and another table."""

import os
import shutil

import numpy as np
import pytest

from jaxrag.library.retrieve import lance, row_ids
from jaxrag.library.retrieve.lance import VectorIndex
from jaxrag.library.retrieve.row_ids import RowIds

DIM = 8


def vectors(seed, count):
    rows = np.random.default_rng(seed).standard_normal((count, DIM))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def nearest(index, rows):
    return index.search(rows, 1)[0][:, 0].tolist()


class Table:
    """Rows by number, and how often they were read."""

    def __init__(self):
        self.ids, self.asked = {}, []

    def read(self, first):
        self.asked.append(first)
        numbers = [number for number in self.ids if number >= first]
        return np.array(numbers[::-1], np.int64), np.array(
            [self.ids[number] for number in numbers[::-1]], np.int64
        )


def test_only_rows_that_came_since_are_read(tmp_path):
    table = Table()
    table.ids = {0: 70, 1: 71, 1 << 32: 80}
    known = RowIds(tmp_path, table.read)
    assert known.of(np.array([1 << 32, 0, 1]), lambda: 3).tolist() == [80, 70, 71]
    assert known.of(np.array([1, 0]), lambda: 3).tolist() == [71, 70] and table.asked == [0]
    table.ids |= {(1 << 32) + 1: 81, 2 << 32: 90}
    assert known.of(np.array([2 << 32, 0]), lambda: 5).tolist() == [90, 70]
    assert table.asked == [0, (1 << 32) + 1]
    assert known.of(np.array([5 << 32, 1]), lambda: 5).tolist() == [-1, 71], (
        "a row that is gone by now"
    )
    assert known.of(np.zeros(0, np.int64), lambda: 5).tolist() == []
    known.close()
    assert known.of(np.array([0]), lambda: 5).tolist() == [70], "closed, it starts again"


def test_rows_that_came_with_smaller_numbers_are_found(tmp_path):
    """A compaction reserves its numbers, and another process adds rows before it is done."""
    table = Table()
    table.ids = {0: 70, 9 << 32: 90}
    known = RowIds(tmp_path, table.read)
    assert known.of(np.array([9 << 32]), lambda: 2).tolist() == [90]
    table.ids = {5 << 32: 70, 9 << 32: 90}
    assert known.of(np.array([5 << 32, 9 << 32]), lambda: 2).tolist() == [70, 90]


def test_an_open_folder_is_let_go(tmp_path):
    table = Table()
    table.ids = {0: 1}
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        RowIds(tmp_path, table.read).of(np.array([0]), lambda: 1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_rows_that_left_are_let_go(tmp_path, monkeypatch):
    monkeypatch.setattr(row_ids, "_FEW", 0)
    table = Table()
    table.ids = {number: number + 100 for number in range(100)}
    known = RowIds(tmp_path, table.read)
    known.of(np.array([3]), lambda: 100)
    for number in range(90):
        del table.ids[number]
    table.ids[100] = 200
    assert known.of(np.array([95, 100]), lambda: 11).tolist() == [195, 200]
    assert len(known._held[0]) == 11


def test_another_folder_in_its_place_is_read_anew(tmp_path):
    table, folder = Table(), tmp_path / "table"
    folder.mkdir()
    table.ids = {0: 1, 1: 2}
    known = RowIds(folder, table.read)
    assert known.of(np.array([0, 1]), lambda: 2).tolist() == [1, 2]
    for ids in ({0: 2, 1: 1}, {0: 9, 1: 8}):  # the numbers are the same
        shutil.rmtree(folder)
        folder.mkdir()
        table.ids = ids
        assert known.of(np.array([0, 1]), lambda: 2).tolist() == list(ids.values())


@pytest.mark.parametrize("rows_of_index", [10**9, 100], ids=["compared", "indexed"])
def test_found_ids_are_those_of_the_vectors_whatever_happens_to_rows(
    tmp_path, monkeypatch, rows_of_index
):
    monkeypatch.setattr(lance, "_INDEX_FROM", rows_of_index)
    data, ids = vectors(1, 400), np.random.default_rng(2).permutation(10_000)[:400]
    index, reader = VectorIndex.open(tmp_path, DIM), None
    held = {}
    for start in range(0, 240, 40):
        index.add(ids[start : start + 40], data[start : start + 40])
        held.update(zip(ids[start : start + 40].tolist(), range(start, start + 40), strict=True))
        index.remove(gone := ids[start : start + 7])
        for one in gone.tolist():
            del held[one]
        moved = list(held)[::9]  # get vectors of others, and rows of their own
        index.add(np.array(moved), data[[held[one] for one in moved]])
        if start % 120 == 0:
            index.collect(0)  # rows are written to other places
        reader = reader or VectorIndex.open(tmp_path, DIM, mode="r")
        for one in (index, reader):
            assert nearest(one, data[list(held.values())]) == list(held)
    index.close()
    reader.close()
