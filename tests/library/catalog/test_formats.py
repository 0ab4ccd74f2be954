"""A catalog of format 3, and how it becomes one of today's format.

``goldens/catalog/format3.sqlite`` was written by commit 3b5bb39: the knowledge base of
knowledge_base/conftest.py with ``chunk_tokens=60`` and the encoders isolated and neighbours,
to which four documents d0 to d3 of 30 random words were added and d3 removed again.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import apsw
import pytest

from jaxrag.base.errors import StoreError
from jaxrag.library.catalog import Catalog, database
from jaxrag.library.catalog.digests import Totals, upgrade

GOLDEN = Path(__file__).parents[2] / "goldens" / "catalog" / "format3.sqlite"
WORD = "fjord"


@pytest.fixture
def path(tmp_path):
    return shutil.copy(GOLDEN, tmp_path / "catalog.sqlite")


def told(path):
    """Everything that is told of a catalog."""
    with contextlib.closing(Catalog.open(path)) as catalog:
        return (
            catalog.settings(),
            catalog.documents(),
            [
                (hit.chunk_id, hit.score, hit.text, hit.ids.tolist())
                for hit in catalog.search(WORD, 9)
            ],
            list(catalog.all_keys()),
            catalog.contexts(range(20), "neighbours"),
            [(chunk.text, chunk.ids.tolist()) for chunk in catalog.chunks("d1")],
            catalog.counts(),
        )


def reserved(path):
    """Bytes that each page of a file holds back, and whether the catalog says it is checked."""
    with contextlib.closing(Catalog.open(path)) as catalog:
        return catalog._database.connection.read("main", 0, 0, 100)[1][20], catalog.checked


def test_format_3_answers_and_takes_documents_as_before(path):
    before = told(path)
    assert len(before[2]) > 3
    assert before[6] == {
        "documents": 3,
        "chunks": 12,
        "tokens": 546,
        "encoded": {"isolated": 12, "neighbours": 12},
    }
    assert reserved(path) == (0, False)
    with contextlib.closing(Catalog.open(path)) as catalog:
        catalog.set("colour", "red")
        assert catalog.remove(["d2"]) == [9, 10, 11, 12]
    with contextlib.closing(Catalog.open(path)) as catalog:
        assert catalog.settings()["colour"] == "red"
        assert [document.id for document in catalog.documents()] == ["d0", "d1"]


def test_what_left_before_an_upgrade_is_remembered_after_it(path):
    with contextlib.closing(Catalog.open(path)) as catalog:
        before, rows = catalog.trace("d2")
        assert before.removed is None and rows.chunks == 4
        catalog.remove(["d2"])
    for _ in range(2):
        with contextlib.closing(Catalog.open(path)) as catalog:
            trace, rows = catalog.trace("d2")
            assert trace.removed is not None
            assert trace.chunk_ids.tolist() == [9, 10, 11, 12]
            assert (rows.documents, rows.chunks, rows.words, rows.contexts) == (0, 0, 0, ())
            assert not len(catalog.trace("d3")[0].chunk_ids), "its removal left nothing"
            catalog.upgrade()


def test_an_upgrade_changes_nothing_that_is_told(path):
    before = told(path)
    catalog = Catalog.open(path)
    versions = {catalog.version()}
    catalog.set("colour", "red")
    versions.add(catalog.version())
    assert catalog.upgrade()
    assert catalog.checked
    versions.add(catalog.version())
    assert catalog.upgrade(), "a second time"
    assert len(catalog.search(WORD, 9)) == len(before[2])
    catalog.forget(["colour"])
    versions.add(catalog.version())
    assert len(versions) == 4, "whoever keeps something of an earlier state looks again"
    catalog.close()
    assert told(path) == before
    assert reserved(path) == (8, True)
    assert [name.name for name in path.parent.iterdir()] == ["catalog.sqlite"]


def test_an_upgraded_catalog_has_the_tables_of_a_new_one(path, tmp_path):
    with contextlib.closing(Catalog.open(path)) as catalog:
        catalog.upgrade()
        with catalog._database.use() as connection:
            found = columns(connection)
            assert Totals.read(connection, path) == Totals.counted(connection)
    with contextlib.closing(Catalog.create(tmp_path / "new.sqlite", {})) as new:
        assert found == columns(new._database.connection)


def columns(connection):
    """By table or index: its kind, and its columns but for their defaults."""
    names = connection.execute("SELECT name, type FROM sqlite_master ORDER BY name").fetchall()
    found = {}
    for name, kind in names:
        rows = connection.execute(f"PRAGMA table_info({name})").fetchall()
        found[name] = (kind, [row[1:4] + row[5:] for row in rows])
    return found


def test_where_another_has_it_open_it_stays_as_it_is(path):
    before = path.read_bytes()
    other = Catalog.open(path)
    with contextlib.closing(Catalog.open(path)) as catalog:
        assert not catalog.upgrade()
        assert len(catalog.search(WORD, 9)) > 3
        catalog.set("colour", "red")
    other.close()
    assert reserved(path) == (0, False)
    path.write_bytes(before)


def test_a_failed_upgrade_leaves_format_3(path, monkeypatch):
    before = told(path)
    with contextlib.closing(Catalog.open(path)) as catalog:

        def fail(connection):
            upgrade(connection)
            raise apsw.FullError("database or disk is full")

        monkeypatch.setattr("jaxrag.library.catalog.catalog.upgrade", fail)
        with pytest.raises(StoreError, match="disk is full; check the disk"):
            catalog.upgrade()
        assert len(catalog.search(WORD, 9)) == len(before[2])
    assert told(path) == before
    assert [name.name for name in path.parent.iterdir()] == ["catalog.sqlite"]


def test_a_read_only_folder_stays_at_format_3(path, monkeypatch):
    monkeypatch.setattr(database.os, "access", lambda path, mode: mode != os.W_OK)
    with contextlib.closing(Catalog.open(path)) as catalog:
        assert not catalog.upgrade()
        assert len(catalog.search(WORD, 9)) > 3


UPGRADE = """
import sys
from pathlib import Path
from jaxrag.library.catalog import Catalog
catalog = Catalog.open(Path(sys.argv[1]))
print(flush=True)
catalog.upgrade()
catalog.close()
"""


@pytest.mark.slow
def test_whoever_is_killed_while_upgrading_leaves_a_whole_catalog(path):
    """30 rounds; the moments cover an upgrade, which takes some 50 ms."""
    before, formats = told(path), []
    for number in range(30):
        shutil.copy(GOLDEN, path)
        writer = subprocess.Popen(
            [sys.executable, "-c", UPGRADE, str(path)], stdout=subprocess.PIPE
        )
        writer.stdout.readline()
        time.sleep(0.003 * number)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        assert told(path) == before
        formats.append(reserved(path))
        with contextlib.closing(Catalog.open(path)) as catalog:
            assert catalog.upgrade()
        assert told(path) == before
        assert sorted(name.name for name in path.parent.iterdir()) == ["catalog.sqlite"]
    assert set(formats) == {(0, False), (8, True)}
