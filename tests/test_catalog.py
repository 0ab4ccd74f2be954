"""The catalog file: transactions, other processes, and files that are not one."""

import sqlite3
import subprocess
import sys
import threading

import numpy as np
import pytest

from jaxrag import catalog as module
from jaxrag.catalog import Catalog, Entry
from jaxrag.chunking import Chunk
from jaxrag.documents import Document
from jaxrag.errors import KnowledgeBaseError, StoreError


def entry(document_id, *texts):
    chunks = [
        Chunk(index, 0, len(text), np.frombuffer(text.encode(), np.uint8).astype(np.int32), text)
        for index, text in enumerate(texts)
    ]
    keys = {"isolated": [f"{document_id}-{chunk.index}" for chunk in chunks]}
    return Entry(Document(document_id, " ".join(texts)), "digest", chunks, keys)


@pytest.fixture
def catalog(tmp_path):
    made = Catalog.create(tmp_path / "catalog.sqlite", {"colour": {"name": "blå"}, "list": ["a"]})
    yield made
    made.close()


def test_what_was_put_comes_back(catalog):
    catalog.put([entry("a", "first lamp", "second 灯塔"), entry("b", "third")])
    chunks = catalog.chunks("a")
    assert [chunk.text for chunk in chunks] == ["first lamp", "second 灯塔"]
    assert [chunk.index for chunk in chunks] == [0, 1]
    assert chunks[1].ids.dtype == np.int32
    assert bytes(chunks[1].ids.astype(np.uint8)).decode() == "second 灯塔"
    assert catalog.keys("a") == {"isolated": ["a-0", "a-1"]}
    assert catalog.document("nobody") is None
    assert [row.id for row in catalog.documents()] == ["a", "b"]
    assert catalog.counts() == {
        "documents": 2,
        "chunks": 3,
        "tokens": sum(row.num_tokens for row in catalog.documents()),
        "encoded": {"isolated": 3},
    }
    assert catalog.settings()["colour"] == {"name": "blå"}


def test_chunk_ids_are_never_used_again(catalog):
    catalog.put([entry("a", "lamp")])
    (before,) = catalog.search("lamp", 1)
    catalog.put([entry("a", "lamp")])
    (after,) = catalog.search("lamp", 1)
    assert after.chunk_id > before.chunk_id


def test_one_bad_entry_undoes_the_whole_transaction(catalog):
    catalog.put([entry("a", "lamp")])
    twice = entry("c", "x", "y")
    with pytest.raises(StoreError):
        catalog.put([entry("a", "sea"), Entry(twice.document, "", [twice.chunks[0]] * 2, {})])
    assert [row.id for row in catalog.documents()] == ["a"]
    assert len(catalog.search("lamp", 5)) == 1
    assert catalog.search("sea", 5) == []


def test_extending_a_setting_keeps_what_another_added(catalog):
    other = Catalog.open(catalog.path)
    assert other.extend("list", ["b", "a"]) == ["a", "b"]
    assert catalog.extend("list", ["c"]) == ["a", "b", "c"]
    other.close()


def test_creating_twice_keeps_the_first(catalog):
    again = Catalog.create(catalog.path, {"colour": "red"})
    assert again.settings() == catalog.settings()
    again.close()


def test_commits_are_durable_and_concurrent(catalog):
    connection = catalog._connection
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)


def test_threads_share_one_catalog(catalog):
    catalog.put([entry("a", "lamp")])
    found, errors = [], []

    def work(number):
        try:
            catalog.put([entry(f"d{number}", "oil")])
            found.append(len(catalog.search("lamp", 5)))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert found == [1] * 8
    assert len(catalog.documents()) == 9


WRITER = """
import sys
from pathlib import Path
import numpy as np
from jaxrag.catalog import Catalog, Entry
from jaxrag.chunking import Chunk
from jaxrag.documents import Document

path, name = Path(sys.argv[1]), sys.argv[2]
catalog = Catalog.create(path, {"made_by": name})
for number in range(20):
    document_id = f"{name}-{number}" if number % 2 else "shared"
    chunk = Chunk(0, 0, 4, np.arange(4, dtype=np.int32), f"lamp {name} {number}")
    catalog.put([Entry(Document(document_id, "text"), name, [chunk], {})])
"""


def test_processes_create_and_write_one_catalog(tmp_path):
    path = tmp_path / "catalog.sqlite"
    names = ["one", "two", "three"]
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), n]) for n in names]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0, 0]
    catalog = Catalog.open(path)
    assert catalog.settings()["made_by"] in names
    assert len(catalog.documents()) == 31
    assert len(catalog.search("lamp", 100)) == 31, "a replaced chunk is still found"
    catalog.close()


def test_missing_foreign_and_newer_files_are_refused(tmp_path, catalog):
    with pytest.raises(KnowledgeBaseError, match="no such catalog"):
        Catalog.open(tmp_path / "missing.sqlite")
    assert not (tmp_path / "missing.sqlite").exists()
    with sqlite3.connect(tmp_path / "other.sqlite") as other:
        other.execute("CREATE TABLE mine (x)")
    other.close()
    before = (tmp_path / "other.sqlite").read_bytes()
    with pytest.raises(KnowledgeBaseError, match="not a knowledge base"):
        Catalog.open(tmp_path / "other.sqlite")
    with pytest.raises(KnowledgeBaseError, match="not a knowledge base"):
        Catalog.create(tmp_path / "other.sqlite", {})
    assert (tmp_path / "other.sqlite").read_bytes() == before
    catalog._connection.execute("PRAGMA user_version = 99")
    with pytest.raises(KnowledgeBaseError, match="format 99"):
        Catalog.open(catalog.path)
    (tmp_path / "text.sqlite").write_text("this is no database at all " * 100)
    with pytest.raises(StoreError, match="not a database"):
        Catalog.open(tmp_path / "text.sqlite")


def test_locked_catalog_says_so(catalog, monkeypatch):
    monkeypatch.setattr(module, "_BUSY_SECONDS", 0.05)
    other = Catalog.open(catalog.path)
    catalog._connection.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked; another process"):
        other.put([entry("a", "lamp")])
    catalog._connection.execute("ROLLBACK")
    other.put([entry("a", "lamp")])
    other.close()
