"""SQLite's write-ahead log: nothing that was acknowledged is left in it."""

import shutil

import apsw
import pytest

from jaxrag.library.catalog import Catalog, database
from jaxrag.library.knowledge_base import KnowledgeBase

FILE = "catalog.sqlite"


def waiting(kb):
    """Bytes of the log beside the catalog."""
    return (kb.path / f"{FILE}-wal").stat().st_size


CHANGES = {
    "add": lambda kb, text: kb.add([text]),
    "remove": lambda kb, text: kb.remove([kb.documents()[0].id]),
    "refresh": lambda kb, text: kb.refresh(),
    "embed": lambda kb, text: kb.embed(),
    "set_gate": lambda kb, text: kb.set_gate("epic", {"ratio": 0.5}),
    "gc": lambda kb, text: kb.gc(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_returned_is_not_in_the_log(make_kb, text_of, embedder, change, tmp_path):
    encoders = ("after_prefix", "neighbours") if change == "refresh" else ("isolated",)
    kb = make_kb(embedder=embedder, index="exact", encoders=encoders)
    kb.add([text_of(1, 20), text_of(2, 20)])
    kb._catalog.set("a change", True)
    assert waiting(kb) > 0
    CHANGES[change](kb, text_of(3, 20))
    assert waiting(kb) == 0
    # What a copy without any log holds is all there is.
    shutil.copytree(kb.path, tmp_path / "copy", ignore=shutil.ignore_patterns("*-wal", "*-shm"))
    with KnowledgeBase.open(tmp_path / "copy", mode="r") as copy:
        assert copy.documents() == kb.documents()
        assert copy._catalog.settings() == kb._catalog.settings()


def test_a_reader_of_an_older_state_delays_the_checkpoint_only(kb, text_of, monkeypatch):
    monkeypatch.setattr(database, "_CHECKPOINT_SECONDS", 0.05)
    kb.add([text_of(1, 20)])
    reader = apsw.Connection(str(kb.path / FILE))
    reader.execute("BEGIN")
    assert reader.execute("SELECT COUNT(*) FROM documents").fetchone() == (1,)
    kb.add([text_of(2, 20)])
    assert waiting(kb) > 0
    other = Catalog.open(kb.path / FILE)
    assert len(other.documents()) == 2
    other.close()
    assert reader.execute("SELECT COUNT(*) FROM documents").fetchone() == (1,)
    reader.close()
    kb.add([text_of(3, 20)])
    assert waiting(kb) == 0
    timeout = kb._catalog._database.connection.execute("PRAGMA busy_timeout").fetchone()
    assert timeout == (1000 * database.BUSY_SECONDS,)
