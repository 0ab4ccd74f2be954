"""Packed postings in a catalog: other processes, kills at any moment, and catalogs of before."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import apsw
import numpy as np
import pytest

from jaxrag.library.catalog import Catalog, NewDocument
from jaxrag.library.catalog.audit import Examined
from jaxrag.library.documents import Document
from jaxrag.library.documents.chunking import Chunk
from jaxrag.library.retrieve import bm25, joining, packed, packing
from jaxrag.library.retrieve.bm25 import BM25Index
from jaxrag.library.retrieve.packed import PACKED

WORDS = [f"w{n}" for n in range(80)]


def pack_early():
    """Few chunks are many, so that postings are packed and blocks joined all the time."""
    bm25._MANY_CHUNKS, bm25._AT_ONCE, packing._LOOSE = 30, 6, 6
    joining._TIERS, packed._ROWS, joining._TERMS, joining._DROPPED = (16, 64), 7, 2, 5
    packed._PART, packed._SHORT = 4, 12


@pytest.fixture(autouse=True)
def small(monkeypatch):
    names = [(bm25, "_MANY_CHUNKS"), (bm25, "_AT_ONCE"), (packing, "_LOOSE"), (packed, "_ROWS")]
    names += [(packed, "_PART"), (packed, "_SHORT")]
    for module, name in [*names, *((joining, it) for it in ("_TIERS", "_TERMS", "_DROPPED"))]:
        monkeypatch.setattr(module, name, getattr(module, name))
    pack_early()


def entry(catalog, name, rng, version=0):
    texts = [" ".join(rng.choices(WORDS, k=9)) + f" {name} v{version}" for _ in range(3)]
    chunks = [
        Chunk(index, 0, len(text), np.arange(5, dtype=np.int32), text)
        for index, text in enumerate(texts)
    ]
    return NewDocument(
        document=Document(name, " ".join(texts)),
        digest=f"{name} {version}",
        chunks=chunks,
        keys={"isolated": [f"{name}-{version}-{chunk.index}" for chunk in chunks]},
        content_ids=[f"content of {text}" for text in texts],
        chunk_ids=catalog.reserve(len(chunks)),
    )


def work(path, seed):
    """Add, replace and remove documents for ever; a line for each change that was acknowledged."""
    pack_early()
    rng = random.Random(seed)
    with contextlib.closing(Catalog.open(path)) as catalog:
        for step in range(10**6):
            name = f"d{rng.randrange(40)}"
            if rng.random() < 0.3:
                catalog.remove([name])
                print(f"{name} -", flush=True)
            else:
                version = 1000 * seed + step
                names = {name, *(f"d{rng.randrange(40)}" for _ in range(rng.choice((0, 0, 3))))}
                catalog.put([entry(catalog, it, rng, version) for it in names])
                print("".join(f"{it} {version}\n" for it in names), end="", flush=True)


def write_once(path):
    """Add a document to a catalog of before; a line before each step of packing it."""
    pack_early()
    packing._PACKED_AT_ONCE, packing._CLEARED_AT_ONCE = 4, 200
    step = packing.Packing.step

    def told(self, texts):
        print("step", flush=True)
        return step(self, texts)

    packing.Packing.step = told
    with contextlib.closing(Catalog.open(path)) as catalog:
        catalog.put([entry(catalog, "new", random.Random(1))])
    print("done", flush=True)


def check(catalog):
    """Words, totals and answers are those of the chunks that there are."""
    report = catalog.audit().check(lambda stored: Examined())
    assert report.whole, report.faults
    texts = catalog.texts(catalog.chunk_ids())
    with contextlib.closing(apsw.Connection(":memory:")) as connection:
        plain = BM25Index(connection)
        plain.create()
        plain.add(texts)
        rng = random.Random(1)
        for _ in range(10):
            question = " ".join(rng.choices(WORDS, k=4))
            found = [(hit.chunk_id, hit.score) for hit in catalog.search(question, 5)]
            assert found == [tuple(it) for it in plain.search(question, 5)]


def check_lists(catalog):
    """A list goes with its row."""
    with catalog._database.use() as connection:
        count = "SELECT COUNT(*) FROM {}".format
        (lists,) = connection.execute(count("lists")).fetchone()
        where = " WHERE typeof(postings) = 'integer'"
        (named,) = connection.execute(count("packed") + where).fetchone()
    assert lists == named > 0


def started(call):
    """A process that makes a call of this file."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); "
        f"import test_packed_catalog as t; from pathlib import Path; t.{call}"
    )
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def kill_often(path, kills):
    rng = random.Random(kills)
    known: dict[str, str] = {}
    blocks = 0
    for seed in range(kills):
        with started(f"work(Path({str(path)!r}), {seed})") as worker:
            assert worker.stdout is not None
            for _ in range(rng.randrange(5, 60)):
                name, state = worker.stdout.readline().split()
                known[name] = state
            os.kill(worker.pid, signal.SIGKILL)
            known |= dict(line.split() for line in worker.stdout if line.endswith("\n"))
        with contextlib.closing(Catalog.open(path)) as catalog:
            held = {it.id: it.digest.split()[1] for it in catalog.documents()}
            unlike = [name for name in known if held.get(name, "-") != known[name]]
            states = {held.get(name, "-") for name in unlike}
            assert len(unlike) <= 1 or len(states) == 1  # the change that was under way
            known |= {name: held.get(name, "-") for name in unlike}
            check(catalog)
            check_lists(catalog)
            blocks = max(blocks, len(catalog._index.packed.blocks()))
    assert blocks > 1


def test_a_kill_leaves_words_and_chunks_as_one(tmp_path):
    path = tmp_path / "catalog.sqlite"
    Catalog.create(path, {"vectors": None}).close()
    kill_often(path, 3)


def test_a_kill_amid_the_first_writing_leaves_a_whole_catalog(tmp_path, monkeypatch):
    rng = random.Random(6)
    before = tmp_path / "before.sqlite"
    with monkeypatch.context() as early:
        early.setattr(bm25, "_MANY_CHUNKS", 10**9)
        with contextlib.closing(Catalog.create(before, {"vectors": None})) as catalog:
            for n in range(20):
                catalog.put([entry(catalog, f"d{n}", rng)])
    packed_chunks = []
    for steps in (2, 6, 12):  # before the second, the first is done
        path = tmp_path / f"{steps}.sqlite"
        shutil.copy(before, path)
        with started(f"write_once(Path({str(path)!r}))") as worker:
            assert worker.stdout is not None
            assert [worker.stdout.readline() for _ in range(steps)] == ["step\n"] * steps
            os.kill(worker.pid, signal.SIGKILL)
        with contextlib.closing(Catalog.open(path)) as catalog:
            assert len(catalog.documents()) == 21
            (version,) = catalog._database.connection.execute("PRAGMA user_version").fetchone()
            assert version == PACKED
            check(catalog)
            blocks = catalog._index.packed.blocks()
            packed_chunks.append(sum(int((block.ids > 0).sum()) for block in blocks))
            catalog.put([entry(catalog, "other", rng)])
            assert sum(len(block.ids) for block in catalog._index.packed.blocks()) == 66
            check(catalog)
    assert any(0 < count < 63 for count in packed_chunks), packed_chunks


def test_joining_that_ends_between_any_two_steps_goes_on_later(tmp_path, monkeypatch):
    path = tmp_path / "catalog.sqlite"
    rng = random.Random(5)
    Catalog.create(path, {"vectors": None}).close()
    step, left = joining.Joining.step, [0]
    unfinished = 0

    def ending(self):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(joining.Joining, "step", ending)
    for n in range(60):
        left[0] = rng.randrange(30)
        with contextlib.closing(Catalog.open(path)) as catalog:
            with contextlib.suppress(KeyboardInterrupt):
                catalog.put([entry(catalog, f"d{n}", rng)])
            if n % 7 == 6:
                catalog.remove([f"d{n - 3}"])
            check(catalog)
            if catalog._index.packed.is_there():
                rows = "SELECT (SELECT COUNT(*) FROM joining) + (SELECT COUNT(*) FROM leftover)"
                unfinished += catalog._database.connection.execute(rows).fetchone()[0] > 0
    assert unfinished > 10
    left[0] = 10**6
    monkeypatch.setattr("jaxrag.library.catalog.catalog._JOIN_STEPS", 10**6)
    with contextlib.closing(Catalog.open(path)) as catalog:
        for n in range(60, 64):
            catalog.put([entry(catalog, f"d{n}", rng)])
        blocks = catalog._index.packed.blocks()
        numbers = {row[0] for row in catalog._database.connection.execute(
            "SELECT DISTINCT block FROM packed")}  # fmt: skip
        assert numbers == {block.number for block in blocks}, "nothing is left of what was joined"
        check(catalog)


def test_an_addition_joins_for_some_steps_and_later_ones_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxrag.library.catalog.catalog._JOIN_STEPS", 3)
    step, taken = joining.Joining.step, []
    monkeypatch.setattr(joining.Joining, "step", lambda self: taken.append(1) or step(self))
    rng = random.Random(6)
    with contextlib.closing(Catalog.create(tmp_path / "c.sqlite", {"vectors": None})) as catalog:
        most = []
        for n in range(400):
            taken.clear()
            catalog.put([entry(catalog, f"d{n}", rng)])
            most.append(len(taken))
        assert max(most) == 3 and sum(most) > 300
        check(catalog)
        sizes = [len(block.ids) for block in catalog._index.packed.blocks()]
        assert max(sizes) > 16, "blocks are joined nevertheless"
