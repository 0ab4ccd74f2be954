"""Packed postings: the very answers of those that are not, whatever is added, left or damaged."""

import contextlib
import json

import apsw
import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import DamagedCatalogError
from jaxrag.library.retrieve import bm25, joining, maxscore, packed, packing
from jaxrag.library.retrieve.bm25 import BM25Index
from jaxrag.library.retrieve.filters import Filter
from jaxrag.library.retrieve.joining import Joining
from jaxrag.library.retrieve.packed import Packed
from jaxrag.library.retrieve.packing import Packing

WORDS = [*(f"w{n}" for n in range(60)), "灯塔守", "the"]
SHARE = 1 / np.arange(1, len(WORDS) + 1)

STEPS = 5  # of joining, between two changes


def text(rng):
    return " ".join(rng.choice(WORDS, rng.integers(0, 14), p=SHARE / SHARE.sum()))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Blocks of few chunks, made early, and joined often."""
    monkeypatch.setattr(bm25, "_MANY_CHUNKS", 20)
    monkeypatch.setattr(bm25, "_AT_ONCE", 7)
    monkeypatch.setattr(packing, "_LOOSE", 7)
    monkeypatch.setattr(packing, "_PACKED_AT_ONCE", 5)
    monkeypatch.setattr(packing, "_CLEARED_AT_ONCE", 30)
    monkeypatch.setattr(joining, "_TIERS", (16, 64))
    monkeypatch.setattr(joining, "MOST_CHUNKS", 100)
    monkeypatch.setattr(packed, "MOST_CHUNKS", 100)
    monkeypatch.setattr(packed, "_ROWS", 5)
    monkeypatch.setattr(packed, "_PART", 4)
    monkeypatch.setattr(packed, "_SHORT", 12)
    monkeypatch.setattr(packed, "_MOST_HELD", 300)
    monkeypatch.setattr(joining, "_TERMS", 7)
    monkeypatch.setattr(joining, "_DROPPED", 11)


class Pair:
    """An index that packs, and one that never does, of the same chunks."""

    def __init__(self):
        self.texts = {}
        self.steps = 100  # of packing, after each addition
        self.one, self.other = (BM25Index(apsw.Connection(":memory:")) for _ in range(2))
        for index in (self.one, self.other):
            index.create()
            index.connection.execute("CREATE TABLE documents (id TEXT, metadata TEXT)")
            index.connection.execute("CREATE TABLE chunks (id INTEGER, document_id TEXT)")
            index.connection.executemany(
                "INSERT INTO documents VALUES (?, ?)",
                [(f"d{n}", f'{{"year": {n}}}') for n in range(3)],
            )

    def add(self, texts):
        count = len(self.texts)
        self.texts |= texts
        for index, chunks in ((self.one, count), (self.other, -(10**6))):
            index.add(texts, chunks)
            index.connection.executemany(
                "INSERT INTO chunks VALUES (?, ?)", [(i, f"d{i % 3}") for i in texts]
            )
        self.pack(self.steps)
        self.join(STEPS)

    def pack(self, steps):
        """Take some steps of packing."""

        def texts(ids):
            return {i: self.texts[i] for i in ids}

        if Packing(self.one, len(self.texts)).is_due():
            for _ in range(steps):
                if not Packing(self.one, len(self.texts)).step(texts):
                    return

    def join(self, steps):
        """Take some steps of joining: the next change comes amid it."""
        return any(not Joining(self.one.packed).step() for _ in range(steps))

    def remove(self, ids):
        gone = {i: self.texts.pop(i) for i in ids}
        for index in (self.one, self.other):
            index.remove(gone)
            index.connection.executemany("DELETE FROM chunks WHERE id = ?", [(i,) for i in gone])

    def compare(self, rng):
        for _ in range(12):
            question = " ".join(rng.choice(WORDS, rng.integers(1, 9)))
            where = None if rng.random() < 0.5 else Filter.parse({"year": int(rng.integers(3))})
            for k in (1, 3, 10, 1000):
                expected = self.other.search(question, k, where)
                assert self.one.search(question, k, where) == expected

    def close(self):
        self.one.connection.close()
        self.other.connection.close()


@pytest.fixture
def pair():
    with contextlib.closing(Pair()) as made:
        yield made


@pytest.mark.parametrize(("seed", "steps"), [(1, 100), (3, 1), (4, 2)])
def test_packed_postings_answer_as_others(pair, monkeypatch, seed, steps):
    if seed % 2:
        monkeypatch.setattr(maxscore, "_WORTH", 0)  # early looks, however few postings are left
    rng = np.random.default_rng(seed)
    pair.steps = steps  # of packing: the next change comes amid it
    last = 0
    for _ in range(25):
        ids = last + 1 + np.sort(rng.choice(20, rng.integers(1, 20), replace=False))
        last = int(ids[-1])
        pair.add({int(i): text(rng) for i in ids})
        pair.remove([int(i) for i in rng.permutation(list(pair.texts))[: rng.integers(0, 5)]])
        pair.compare(rng)
    sizes = [np.count_nonzero(block.ids) for block in pair.one.packed.blocks()]
    assert len(sizes) > 1 and max(sizes) > 8
    assert pair.one.count_unlike(sorted(pair.texts.items())) == 0


def test_blocks_stay_few(pair, monkeypatch):
    """One that is nearly full does not keep others from becoming one."""
    monkeypatch.setattr(joining, "MOST_CHUNKS", 64)
    rng = np.random.default_rng(5)
    for first in range(1, 1001, 9):
        pair.add({i: text(rng) for i in range(first, first + 9)})
    assert pair.join(10_000)
    sizes = [len(block.ids) for block in pair.one.packed.blocks()]
    assert sum(sizes) > 980
    assert sum(size < 48 for size in sizes) <= 6, sizes


def test_joining_goes_on_where_it_was_left_and_begins_anew_where_a_source_changed(pair):
    rng = np.random.default_rng(6)
    for first in range(1, 60, 8):
        pair.add({i: text(rng) for i in range(first, first + 8)})

    def state():
        return pair.one.connection.execute("SELECT block, sources, after FROM joining").fetchone()

    while state() is None or not state()[2]:
        assert Joining(pair.one.packed).step()
    number, sources, after = state()
    while state() is not None and state()[2] == after:
        assert Joining(Packed(pair.one.connection, pair.one.path)).step()  # of another process
    assert state() is None or (state()[:2] == (number, sources) and state()[2] > after)
    while state() is None or not state()[2]:
        assert Joining(pair.one.packed).step()
    (first, _), *_ = json.loads(state()[1])
    block = next(it for it in pair.one.packed.blocks() if it.number == first)
    pair.remove([int(block.ids[block.ids > 0][0])])
    for table in ("joining", "leftover"):
        assert pair.one.connection.execute(f"SELECT COUNT(*) FROM {table}").fetchone() == (0,)
    assert pair.join(10_000)
    pair.compare(rng)


@pytest.mark.parametrize("steps", [0, 2, 40, 60])
def test_nothing_is_left_of_a_chunk_that_leaves(pair, steps):
    rng = np.random.default_rng(4)
    for first in range(1, 60, 8):
        pair.add({i: f"{text(rng)} secret{i}" for i in range(first, first + 8)})
    pair.join(steps)  # what is being joined and what was has rows that no search sees
    assert pair.one.packed.blocks()
    assert [found.chunk_id for found in pair.one.search("secret31", 5)] == [31]
    pair.remove([31])
    assert pair.one.search("secret31", 5) == []
    rows = pair.one.connection.execute("SELECT term FROM packed WHERE term = 'secret31'")
    assert rows.fetchall() == []
    pair.remove(list(pair.texts))
    assert pair.one.packed.blocks() == []
    assert pair.one.connection.execute("SELECT COUNT(*) FROM packed").fetchone() == (0,)


def test_a_pack_that_is_rolled_back_leaves_all_as_it_was(pair):
    rng = np.random.default_rng(5)
    pair.add({i: text(rng) for i in range(1, 40)})
    pair.add({i: text(rng) for i in range(40, 44)})
    connection = pair.one.connection
    before = connection.execute("SELECT * FROM packed").fetchall()
    connection.execute("BEGIN")
    pair.pack(100)
    assert pair.one.packed.blocks() and connection.execute("SELECT * FROM packed").fetchall()
    connection.execute("ROLLBACK")
    assert connection.execute("SELECT * FROM packed").fetchall() == before
    pair.compare(rng)


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM packed WHERE term = 'lamp'",
        "UPDATE packed SET postings = substr(postings, 2) WHERE term = 'lamp'",
        "UPDATE blocks SET lengths = zeroblob(length(lengths)), xxh3 = xxh3 + 1",
        "DELETE FROM blocks",
        "DELETE FROM terms WHERE term = 'lamp'",
    ],
)
def test_what_is_packed_and_not_as_written_is_refused(pair, statement):
    texts = {i: f"lamp {'oil ' * i}" for i in range(1, 40)}
    pair.add(texts)
    assert pair.one.search("lamp", 5)
    pair.one.connection.execute(statement)
    with refused(DamagedCatalogError):
        BM25Index(pair.one.connection).search("lamp", 5)
    assert BM25Index(pair.one.connection).count_unlike(sorted(texts.items())) > 0
    pair.one.clear()
    pair.one.add(texts)
    assert pair.one.search("lamp oil", 50) == pair.other.search("lamp oil", 50)


def flipped(value, rng):
    """An integer or bytes with another bit."""
    if isinstance(value, int):
        found = (value ^ 1 << int(rng.integers(64))) & (1 << 64) - 1
        return found - (1 << 64) if found >= 1 << 63 else found
    place = int(rng.integers(len(value)))
    return value[:place] + bytes([value[place] ^ 1 << int(rng.integers(8))]) + value[place + 1 :]


def test_a_flipped_bit_of_what_is_packed_is_never_believed(pair):
    """The rows themselves: pages, which have checksums of their own, are whole here."""
    rng = np.random.default_rng(8)
    for first in range(1, 90, 8):
        pair.add({i: f"{text(rng)} lamp" for i in range(first, first + 8)})
    connection = pair.one.connection
    columns = [("packed", it) for it in
               ("holders", "weight", "most", "least", "content", "xxh3", "postings")]  # fmt: skip
    columns += [("blocks", it) for it in ("chunks", "xxh3", "ids", "lengths")]
    questions = [*WORDS, "lamp", " ".join(WORDS[:5])]
    expected = {question: pair.other.search(question, 9) for question in questions}
    refused = 0
    for trial in range(20 * len(columns)):
        table, column = columns[trial % len(columns)]
        key = ("block", "term")[: 1 + (table == "packed")]
        rows = connection.execute(
            f"SELECT {', '.join(key)}, {column} FROM {table} "
            "WHERE block IN (SELECT block FROM blocks)"
        ).fetchall()
        *place, value = rows[rng.integers(len(rows))]
        where = " AND ".join(f"{name} = ?" for name in key)
        connection.execute("BEGIN")
        update = f"UPDATE {table} SET {column} = ? WHERE {where}"
        connection.execute(update, (flipped(value, rng), *place))
        damaged = BM25Index(connection)
        told = 0
        for question in questions:
            try:
                assert damaged.search(question, 9) == expected[question], (table, column)
            except DamagedCatalogError:
                told += 1
        refused += told > 0
        connection.execute("ROLLBACK")
    assert refused > 16 * len(columns)  # of the others, no question has to read what was changed
