"""The catalog file: transactions, other processes, and files that are not one."""

import concurrent.futures
import contextlib
import dataclasses
import os
import sqlite3
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from jaxrag.base.errors import KnowledgeBaseError, StoreError
from jaxrag.library.catalog import Catalog, NewDocument, database
from jaxrag.library.catalog.digests import Totals
from jaxrag.library.catalog.forgotten import SECRET
from jaxrag.library.documents import Document
from jaxrag.library.documents.chunking import Chunk
from jaxrag.library.retrieve.filters import Filter


def entry(catalog, document_id, *texts, title="", metadata=None, digest="digest"):
    """A document of these chunks, under ids that the catalog reserved."""
    chunks = [
        Chunk(index, 0, len(text), np.frombuffer(text.encode(), np.uint8).astype(np.int32), text)
        for index, text in enumerate(texts)
    ]
    return NewDocument(
        document=Document(document_id, " ".join(texts), title=title, metadata=metadata or {}),
        digest=digest,
        chunks=chunks,
        keys={"isolated": [f"{document_id}-{chunk.index}" for chunk in chunks]},
        content_ids=[f"content of {text}" for text in texts],
        chunk_ids=catalog.reserve(len(chunks)),
    )


def ids_of(catalog, word):
    return [hit.chunk_id for hit in catalog.search(word, 100)]


@pytest.fixture
def catalog(tmp_path):
    made = Catalog.create(tmp_path / "catalog.sqlite", {"colour": {"name": "blå"}, "list": ["a"]})
    yield made
    made.close()


def test_what_was_put_comes_back(catalog):
    catalog.put([entry(catalog, "a", "first lamp", "second 灯塔"), entry(catalog, "b", "third")])
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


def test_a_removed_document_leaves_no_word_of_its_title(catalog):
    catalog.put([entry(catalog, "a", "first lamp", "second", title="Old harbour")])
    catalog.put([entry(catalog, "b", "third", title="New harbour")])
    assert len(ids_of(catalog, "harbour")) == 3
    assert catalog.remove(["a", "b"]) == [1, 2, 3]
    with catalog._database.use() as connection:
        assert connection.execute("SELECT COUNT(*) FROM postings").fetchone() == (0,)


def test_a_setting_is_changed_by_what_it_was(catalog):
    assert catalog.swap("count", lambda value: [value]) is None
    assert catalog.swap("count", lambda value: [*value, 2]) == [None]
    assert catalog.settings()["count"] == [None, 2]

    def fail(value):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        catalog.swap("count", fail)
    assert catalog.settings()["count"] == [None, 2]


def test_chunk_ids_are_never_used_again(catalog):
    catalog.put([entry(catalog, "a", "lamp")])
    (before,) = catalog.search("lamp", 1)
    catalog.put([entry(catalog, "a", "lamp")])
    (after,) = catalog.search("lamp", 1)
    assert after.chunk_id > before.chunk_id
    unused = catalog.reserve(3)
    catalog.remove(["a"])
    catalog.strays(np.zeros(0, np.int64), made_before=time.time() + 1)
    assert min(catalog.reserve(1)) > max(unused)


def test_reservations_of_two_catalogs_do_not_meet(catalog):
    other = Catalog.open(catalog.path)
    taken = [*catalog.reserve(3), *other.reserve(2), *catalog.reserve(0), *catalog.reserve(4)]
    assert len(set(taken)) == 9
    other.close()


def test_an_id_that_was_not_reserved_is_refused(catalog):
    made = entry(catalog, "a", "lamp")
    for chunk_id in (made.chunk_ids[0] + 1, 0):
        with pytest.raises(StoreError, match="not reserved"):
            catalog.put([dataclasses.replace(made, chunk_ids=[chunk_id])])
    assert catalog.documents() == []


def test_put_and_remove_say_which_chunks_left(catalog):
    assert catalog.put([entry(catalog, "a", "lamp", "oil"), entry(catalog, "b", "sea")]) == []
    lamp, oil, sea = ids_of(catalog, "lamp") + ids_of(catalog, "oil") + ids_of(catalog, "sea")
    assert catalog.put([entry(catalog, "a", "lamp")]) == [lamp, oil]
    assert catalog.remove(["b", "nobody"]) == [sea]
    assert catalog.document("b") is None
    assert ids_of(catalog, "sea") == []
    assert catalog.leaving() == []  # nothing to settle without vectors


def test_ids_that_left_wait_until_they_are_settled(catalog):
    catalog.set("vectors", {"index": "exact"})
    catalog.put([entry(catalog, "a", "lamp"), entry(catalog, "b", "sea")])
    left = catalog.put([entry(catalog, "a", "oil")]) + catalog.remove(["b"])
    assert sorted(catalog.leaving()) == sorted(left)
    again = Catalog.open(catalog.path)
    again.settle(left[:1])
    assert again.leaving() == left[1:]
    again.close()


def test_a_writer_that_knows_nothing_of_the_vectors_is_refused(catalog):
    other = Catalog.open(catalog.path)
    catalog.set("vectors", {"index": "exact"})
    with pytest.raises(KnowledgeBaseError, match="open it again"):
        other.put([entry(other, "a", "lamp")])
    other.remove(["nobody"])
    other.close()
    catalog.put([entry(catalog, "a", "lamp")])


def test_strays_are_ids_of_no_chunk_whose_writer_had_time_enough(catalog):
    catalog.put([entry(catalog, "a", "lamp")])
    lost = list(catalog.reserve(2))
    held = np.array([*ids_of(catalog, "lamp"), *lost], np.int64)
    assert catalog.strays(held, made_before=time.time() - 3600).tolist() == []
    catalog.reserve(1)
    late = entry(catalog, "b", "sea")
    assert catalog.strays(held, made_before=time.time() + 1, dry_run=True).tolist() == lost
    catalog.put([dataclasses.replace(late, chunk_ids=lost[:1])])  # as a slow writer may
    catalog.remove(["b"])
    assert catalog.strays(held, made_before=time.time() + 1).tolist() == lost
    dead = dataclasses.replace(late, chunk_ids=lost[:1])
    with pytest.raises(StoreError, match="longer than"):
        catalog.put([dead])


def test_further_keys_leave_the_chunks_as_they_are(catalog):
    catalog.put([entry(catalog, "a", "lamp", "oil")])
    before = catalog.chunk_ids().tolist()
    x, y = "1" * 40, "2" * 40
    more = {"after_prefix": [x, y]}
    catalog.put_keys([("a", "digest", more), ("a", "another", {"isolated": ["!", "!"]})])
    assert catalog.keys("a") == {"isolated": ["a-0", "a-1"], **more}
    assert catalog.chunk_ids().tolist() == before
    assert catalog.keys_of(before[1:], "after_prefix") == {before[1]: y}
    assert list(catalog.all_keys()) == [x, y], "what is no key is left out"
    assert catalog.chunk_of(y).encoder == "after_prefix"
    assert bytes(catalog.chunk_of(y).ids.astype(np.uint8)) == b"oil"
    assert catalog.chunk_of("z") is None


def test_live_are_own_keys_and_foreign_variants_of_own_tokens(catalog):
    catalog.put([entry(catalog, "a", "lamp")])

    def live(key, text, encoder):
        return catalog.is_live(key, f"content of {text}", encoder, ["isolated"])

    assert live("a-0", "anything", "isolated")
    assert live("variant", "lamp", "neighbours")
    assert not live("old", "lamp", "isolated")
    assert not live("variant", "oil", "neighbours")
    catalog.remove(["a"])
    assert not live("a-0", "lamp", "isolated")
    assert not live("variant", "lamp", "neighbours")


def test_a_filter_restricts_everything(catalog):
    years = {"a": 2019, "b": 2020, "c": 2021}
    catalog.put(
        [entry(catalog, name, "lamp", metadata={"year": year}) for name, year in years.items()]
    )
    new = Filter.parse({"year": {"$gte": 2020}})
    assert [hit.document_id for hit in catalog.search("lamp", 5, new)] == ["b", "c"]
    assert [hit.metadata for hit in catalog.search("lamp", 5, new)] == [
        {"year": 2020}, {"year": 2021},
    ]  # fmt: skip
    assert [row.id for row in catalog.documents(new)] == ["b", "c"]
    ids = catalog.chunk_ids()
    assert catalog.chunk_ids(new).tolist() == ids[1:].tolist()
    hits = catalog.hits([(ids[2], 0.9), (99, 0.8), (ids[0], 0.7)])
    assert [(hit.document_id, hit.score) for hit in hits] == [("c", 0.9), ("a", 0.7)]
    assert [hit.document_id for hit in catalog.hits([(i, 1.0) for i in ids], new)] == ["b", "c"]
    assert catalog.texts([ids[0], 99]) == {ids[0]: "lamp"}


def test_page_section_and_place_come_back(catalog):
    made = entry(catalog, "a", "lamp")
    chunk = dataclasses.replace(made.chunks[0], start=7, end=11, page=3, section="Oil > Lamps")
    catalog.put([dataclasses.replace(made, chunks=[chunk])])
    (hit,) = catalog.search("lamp", 1)
    assert (hit.page, hit.section, hit.start, hit.end) == (3, "Oil > Lamps", 7, 11)
    (read,) = catalog.chunks("a")
    assert (read.page, read.section, read.start, read.end) == (3, "Oil > Lamps", 7, 11)


def test_removed_text_is_not_left_in_the_file(catalog):
    catalog.put([entry(catalog, "a", "the secret of the lamp")])
    catalog.remove(["a"])
    catalog.close()
    assert b"secret" not in catalog.path.read_bytes()


def test_read_only_folder(catalog, monkeypatch):
    catalog.put([entry(catalog, "a", "lamp")])
    writes = os.access
    monkeypatch.setattr(
        database.os, "access", lambda path, mode: mode != os.W_OK and writes(path, mode)
    )
    waiting = Catalog.open(catalog.path)  # frames wait in the WAL of the open one
    assert len(waiting.search("lamp", 5)) == 1
    waiting.close()
    catalog.close()
    reader = Catalog.open(catalog.path)
    assert not reader.writable
    assert len(reader.search("lamp", 5)) == 1
    assert sorted(path.name for path in catalog.path.parent.iterdir()) == ["catalog.sqlite"]
    with pytest.raises(StoreError, match="read-only"):
        reader.remove(["a"])
    reader.close()


def test_one_bad_entry_undoes_the_whole_transaction(catalog):
    catalog.put([entry(catalog, "a", "lamp")])
    twice = entry(catalog, "c", "x", "y")
    twice = dataclasses.replace(twice, chunks=[twice.chunks[0]] * 2)
    with pytest.raises(StoreError):
        catalog.put([entry(catalog, "a", "sea"), twice])
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
    connection = catalog._database.connection
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)


def test_the_first_change_does_not_touch_what_another_thread_reads(catalog):
    """SQLite's library refuses a connection that is busy in another thread."""
    begun, end = threading.Event(), threading.Event()
    statement = "WITH n(i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n) SELECT SUM(seen(i)) FROM n"

    def seen(_):
        begun.set()
        if end.is_set():
            raise StopIteration
        return 1

    def read():
        with contextlib.suppress(Exception), catalog._database.use() as connection:
            connection.create_scalar_function("seen", seen)
            connection.execute(statement).fetchall()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert begun.wait(10)
        for _ in range(20):
            catalog._database._writing = None
            catalog.reserve(1)
    finally:
        end.set()
        reader.join()


def test_threads_share_one_catalog(catalog):
    catalog.put([entry(catalog, "a", "lamp")])
    found, errors = [], []

    def work(number):
        try:
            catalog.put([entry(catalog, f"d{number}", "oil")])
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
from jaxrag.library.catalog import Catalog, NewDocument
from jaxrag.library.documents.chunking import Chunk
from jaxrag.library.documents import Document

path, name = Path(sys.argv[1]), sys.argv[2]
catalog = Catalog.create(path, {"made_by": name})
for number in range(20):
    document_id = f"{name}-{number}" if number % 2 else "shared"
    chunk = Chunk(0, 0, 4, np.arange(4, dtype=np.int32), f"lamp {name} {number}")
    document = Document(document_id, "text")
    catalog.put([NewDocument(document, name, [chunk], {}, ["content"], catalog.reserve(1))])
"""


def test_processes_create_and_write_one_catalog(tmp_path):
    path = tmp_path / "catalog.sqlite"
    names = ["one", "two", "three"]
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), n]) for n in names]
    assert [writer.wait(timeout=300) for writer in writers] == [0, 0, 0]
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
    catalog._database.connection.execute("PRAGMA user_version = 99")
    with pytest.raises(KnowledgeBaseError, match="format 99, this version reads formats 4 and 6"):
        Catalog.open(catalog.path)
    (tmp_path / "text.sqlite").write_text("this is no database at all " * 100)
    with pytest.raises(StoreError, match="not a database"):
        Catalog.open(tmp_path / "text.sqlite")


def test_locked_catalog_says_so(catalog, monkeypatch):
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.05)
    other = Catalog.open(catalog.path)
    made = entry(catalog, "a", "lamp")
    catalog._database.connection.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked; another process"):
        other.put([made])
    catalog._database.connection.execute("ROLLBACK")
    other.put([made])
    other.close()


def test_threads_that_read_do_not_wait_for_one_that_writes(catalog):
    catalog.put([entry(catalog, "a", "lamp")])
    with (
        concurrent.futures.ThreadPoolExecutor(1) as other,
        catalog._database.transaction() as connection,
    ):
        connection.execute("DELETE FROM documents")
        assert not catalog.has_documents()  # what this thread wrote
        assert [hit.document_id for hit in other.submit(catalog.search, "lamp", 5).result(30)] == [
            "a"
        ]
        assert other.submit(catalog.has_documents).result(30)
        connection.execute("ROLLBACK")
        connection.execute("BEGIN")
    catalog.put([entry(catalog, "b", "lamp lamp")])
    assert [hit.document_id for hit in catalog.search("lamp", 5)] == ["b", "a"]
    catalog.close()
    with pytest.raises(StoreError, match="was closed"):
        catalog.set("colour", 1)


def test_keys_of_kv_that_has_seen_other_chunks_live_as_long_as_these(catalog):
    catalog.put([entry(catalog, "a", "one"), entry(catalog, "b", "two"), entry(catalog, "c", "3")])
    one, two, three = (catalog.ids_of_document(name)[0] for name in "abc")
    names = {i: f"content of {text}" for i, text in ((one, "one"), (two, "two"), (three, "3"))}
    rows = [
        (one, "k1", [names[two], names[three]]),
        (two, "k2", [names[one]]),
        (three, "k3", []),
        (999, "k4", []),  # no chunk
    ]
    assert catalog.put_contexts("near", rows) == [one, two, three]
    contexts = catalog.contexts([one, two, three, 999], "near")
    assert contexts == {one: [names[two], names[three]], two: [names[one]], three: []}
    assert catalog.contexts([one], "isolated") == {one: []}
    assert catalog.chunk_of("k1").chunk_id == one
    # The same text under another id keeps them; once it is gone they are.
    catalog.put([entry(catalog, "b", "two"), entry(catalog, "d", "two")])
    assert catalog.keys_of([one, two, three], "near") == {one: "k1", three: "k3"}
    catalog.remove(["b"])
    assert catalog.keys_of([one, three], "near") == {one: "k1", three: "k3"}
    catalog.remove(["d"])
    assert catalog.keys_of([one, three], "near") == {three: "k3"}
    assert catalog.keys_of([one, three], "isolated") == {one: "a-0", three: "c-0"}
    assert catalog.contexts([one, three], "near") == {three: []}
    assert catalog.put_contexts("near", [(one, "k5", [names[three], names[two]])]) == []
    assert catalog.put_contexts("near", [(one, "k5", [names[three]])]) == [one]
    catalog.put_contexts("near", [(one, "k6", [])])
    assert catalog.contexts([one], "near") == {one: []}
    found = catalog.with_content([names[three], "content of nothing"])
    assert [(c.content_id, bytes(c.ids.astype(np.uint8))) for c in found.values()] == [
        (names[three], b"3")
    ]
    assert catalog.tokens([one, 999])[one].content_id == names[one]


def test_totals_are_those_of_the_tables_after_every_change(catalog):
    def hold():
        with catalog._database.snapshot() as connection:
            assert Totals.read(connection, catalog.path) == Totals.counted(connection)
        return catalog.totals()

    catalog.set("vectors", None)
    empty = hold()
    catalog.put([entry(catalog, "a", "lamp", "oil lamp"), entry(catalog, "b", "sea")])
    assert hold().chunks == 3
    catalog.put([entry(catalog, "a", "other"), entry(catalog, "a", "lamp again")])
    assert hold().chunks == 2
    catalog.put_contexts("near", [(catalog.ids_of_document("b")[0], "k", [])])
    catalog.set("gate:x", 1)
    catalog.swap("gate:x", lambda value: [value])
    catalog.extend("gate:x", ["y"])
    assert hold().settings == 5  # with the one that a replacement makes
    catalog.remove(["a", "b", "nobody"])
    catalog.forget(["gate:x", SECRET])
    assert hold() == empty


def test_a_failed_change_leaves_the_totals(catalog):
    catalog.put([entry(catalog, "a", "lamp")])
    before = catalog.totals()
    with pytest.raises(ZeroDivisionError):
        catalog.swap("n", lambda value: 1 // 0)
    assert catalog.totals() == before


def test_who_may_only_read_the_folder_sees_what_others_remove(catalog, monkeypatch):
    """Such a file is opened as unchanging, and SQLite itself would never look at it again."""
    catalog.put([entry(catalog, "a", "lamp"), entry(catalog, "b", "lamp oil")])
    catalog.checkpoint()
    path = catalog.path
    catalog.close()
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        reader = Catalog.open(path)
    assert not reader.writable
    assert {hit.document_id for hit in reader.search("lamp", 5)} == {"a", "b"}
    before = reader.version()
    with contextlib.closing(Catalog.open(path)) as writer:
        writer.remove(["a"])
        writer.checkpoint()
        assert [hit.document_id for hit in reader.search("lamp", 5)] == ["b"]
    assert reader.version() != before
    assert reader.document("a") is None
    assert [hit.document_id for hit in reader.search("lamp", 5)] == ["b"]
    reader.close()
