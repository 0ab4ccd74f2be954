"""The catalog file: transactions, other processes, and files that are not one."""

import concurrent.futures
import contextlib
import dataclasses
import os
import sqlite3
import threading
import time

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import KnowledgeBaseError, StoreError
from jaxrag.library.catalog import Catalog, NewDocument, database
from jaxrag.library.documents import Document
from jaxrag.library.documents.chunking import Chunk


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


def test_a_setting_is_changed_by_what_it_was(catalog):
    assert catalog.swap("count", lambda value: [value]) is None
    assert catalog.swap("count", lambda value: [*value, 2]) == [None]
    assert catalog.settings()["count"] == [None, 2]

    def fail(value):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        catalog.swap("count", fail)
    assert catalog.settings()["count"] == [None, 2]


def test_reservations_of_two_catalogs_do_not_meet(catalog):
    other = Catalog.open(catalog.path)
    taken = [*catalog.reserve(3), *other.reserve(2), *catalog.reserve(0), *catalog.reserve(4)]
    assert len(set(taken)) == 9
    other.close()


def test_an_id_that_was_not_reserved_is_refused(catalog):
    made = entry(catalog, "a", "lamp")
    for chunk_id in (made.chunk_ids[0] + 1, 0):
        with refused(StoreError):
            catalog.put([dataclasses.replace(made, chunk_ids=[chunk_id])])
    assert catalog.documents() == []


def test_a_writer_that_knows_nothing_of_the_vectors_is_refused(catalog):
    other = Catalog.open(catalog.path)
    catalog.set("vectors", {"index": "exact"})
    with refused(KnowledgeBaseError):
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
    with refused(StoreError):
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
    assert catalog.chunk_of(y) == ("a", 1, "after_prefix", before[1])
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
        assert begun.wait(300)
        for _ in range(20):
            catalog._database._writing = None
            catalog.reserve(1)
    finally:
        end.set()
        reader.join()


def test_missing_foreign_and_newer_files_are_refused(tmp_path, catalog):
    with refused(KnowledgeBaseError):
        Catalog.open(tmp_path / "missing.sqlite")
    assert not (tmp_path / "missing.sqlite").exists()
    with sqlite3.connect(tmp_path / "other.sqlite") as other:
        other.execute("CREATE TABLE mine (x)")
    other.close()
    before = (tmp_path / "other.sqlite").read_bytes()
    with refused(KnowledgeBaseError):
        Catalog.open(tmp_path / "other.sqlite")
    with refused(KnowledgeBaseError):
        Catalog.create(tmp_path / "other.sqlite", {})
    assert (tmp_path / "other.sqlite").read_bytes() == before
    catalog._database.connection.execute("PRAGMA user_version = 99")
    with refused(KnowledgeBaseError, "99"):
        Catalog.open(catalog.path)
    (tmp_path / "text.sqlite").write_text("this is no database at all " * 100)
    with refused(StoreError):
        Catalog.open(tmp_path / "text.sqlite")


def test_locked_catalog_says_so(catalog, monkeypatch):
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.05)
    other = Catalog.open(catalog.path)
    made = entry(catalog, "a", "lamp")
    catalog._database.connection.execute("BEGIN IMMEDIATE")
    with refused(StoreError):
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
    with refused(StoreError):
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
