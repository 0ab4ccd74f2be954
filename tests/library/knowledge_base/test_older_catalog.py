"""A catalog that is older than its store is refused until it is accepted, then the newest."""

import logging
import shutil

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import KnowledgeBaseError, StoreError
from jaxrag.cli import main
from jaxrag.kv.store.owners import Owners
from jaxrag.library.documents import Document
from jaxrag.library.knowledge_base.location import CATALOG
from jaxrag.library.knowledge_base.settings import CHANGES

OLDER = "older than its store"


def documents(*names):
    return [Document(name, f"{name} amber birch cedar") for name in names]


def ids(kb):
    return [entry.id for entry in kb.documents()]


def copied(kb, path):
    """The catalog of a knowledge base that is closed, put aside."""
    kb.close()
    return shutil.copy2(kb.path / CATALOG, path)


@pytest.fixture
def restored(make_kb, tmp_path):
    """``restored(**options)``: a folder whose catalog is yesterday's, of before a removal."""

    def make(**options):
        kb = make_kb(**options)
        kb.add(documents("one", "two"))
        copy = copied(kb, tmp_path / "yesterday")
        kb = make_kb(embedder=options.get("embedder"))
        kb.remove(["two"])
        kb.add(documents("three"))
        kb.close()
        shutil.copy2(copy, kb.path / CATALOG)
        return kb.path

    return make


@pytest.mark.parametrize(("mode", "elsewhere"), [("r", False), ("rw", False), ("rw", True)])
def test_an_older_catalog_is_refused_in_one_line(restored, make_kb, tmp_path, mode, elsewhere):
    restored(**({"store": tmp_path / "store"} if elsewhere else {}))
    with refused(KnowledgeBaseError, OLDER, "of change 1 where 3 were acknowledged", "no process"):
        make_kb(mode=mode)


def test_one_from_before_there_were_counts_is_older_too(make_kb, tmp_path):
    kb = make_kb()
    kb._catalog.forget([CHANGES])
    copy = copied(kb, tmp_path / "before")
    kb = make_kb()
    kb.add(documents("one"))
    kb.close()
    shutil.copy2(copy, kb.path / CATALOG)
    with refused(KnowledgeBaseError, "0"):
        make_kb()


def test_the_newest_one_and_a_copy_of_the_whole_folder_are_opened(make_kb, tmp_path):
    kb = make_kb()
    kb.add(documents("one", "two"))
    kb.close()
    shutil.copytree(kb.path, tmp_path / "yesterday")
    copy = make_kb()
    copy.remove(["two"])
    assert ids(make_kb(mode="r")) == ids(make_kb()) == ["one"]
    assert ids(make_kb("yesterday")) == ["one", "two"]


def test_one_that_is_accepted_is_the_newest_from_then_on(restored, make_kb, tmp_path):
    folder = restored()
    with refused(KnowledgeBaseError):
        make_kb(accept_older=True, mode="r")
    newer = tmp_path / "newer"
    shutil.copytree(folder, newer)
    kb = make_kb(accept_older=True)
    assert ids(kb) == ["one", "two"]
    kb.close()
    assert ids(make_kb()) == ["one", "two"]  # nothing is asked again
    shutil.copy2(newer / CATALOG, folder / CATALOG)
    with refused(KnowledgeBaseError, OLDER):
        make_kb()


def test_chunks_that_an_accepted_one_lacks_leave_the_vectors(restored, make_kb, embedder):
    restored(embedder=embedder, index="exact")
    kb = make_kb(accept_older=True, embedder=embedder)
    held = kb._catalog.chunk_ids()
    assert set(kb._vectors.index.ids().tolist()) < set(held.tolist())  # what was removed lacks its
    kb.embed()
    assert np.array_equal(np.sort(kb._vectors.index.ids()), np.sort(held))
    kb.add(documents("four"))
    assert kb.search("four amber", 1, mode="vector")[0].document_id == "four"


def test_the_command_refuses_accepts_and_answers(restored, capsys):
    folder = restored()
    assert main(["kb", "list", str(folder)]) != 0
    assert "kb verify --accept-older" in capsys.readouterr().err
    assert main(["kb", "verify", str(folder), "--accept-older"]) == 0
    assert main(["kb", "list", str(folder)]) == 0
    assert "two" in capsys.readouterr().out


def test_what_changes_nothing_is_not_counted(make_kb):
    kb = make_kb()
    kb.add(documents("one"))
    known = kb._owners().changes(kb.id)
    kb.add(documents("one"))
    kb.remove(["nobody"])
    assert (
        (kb._owners().changes(kb.id), kb._catalog.settings()[CHANGES]) == (known, known) == (1, 1)
    )


def test_who_is_killed_before_the_count_gives_no_false_alarm(make_kb, monkeypatch):
    kb = make_kb()
    kb.add(documents("one", "two"))

    class DiedError(BaseException):
        """In place of the process."""

    def die(self, owner_id, changes):
        raise DiedError

    with monkeypatch.context() as patched:
        patched.setattr(Owners, "acknowledge", die)
        with pytest.raises(DiedError):
            kb.remove(["two"])
    kb.close()
    kb = make_kb()
    assert ids(kb) == ["one"]
    assert (kb._owners().changes(kb.id), kb._catalog.settings()[CHANGES]) == (1, 2)
    kb.add(documents("three"))
    assert kb._owners().changes(kb.id) == 3


def test_two_that_write_at_once_are_both_current(make_kb):
    one, two = make_kb(), make_kb()
    one.add(documents("one"))
    two.add(documents("two"))
    one.add(documents("three"))
    assert make_kb(mode="r")._catalog.settings()[CHANGES] == one._owners().changes(one.id) == 3


def test_a_count_of_which_nothing_is_sure_is_no_reason_to_believe(make_kb):
    kb = make_kb()
    kb.add(documents("one"))
    kb.close()
    (file,) = kb.path.rglob("changes.json")
    file.write_bytes(file.read_bytes().replace(b"1", b"0", 1))
    with refused(StoreError):
        make_kb(mode="r")
    file.unlink()
    assert ids(make_kb()) == ["one"]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_catalog_made_anew_says_so_while_it_is_empty(make_kb, tmp_path, caplog, elsewhere):
    options = {"store": tmp_path / "store"} if elsewhere else {}
    kb = make_kb(**options)
    kb.add(documents("one"))
    kb.close()
    for file in kb.path.glob(f"{CATALOG}*"):
        file.unlink()
    with caplog.at_level(logging.WARNING, "jaxrag"):
        first = make_kb(**options)
        first.close()
        second = make_kb(**options)
        second.add(documents("one"))
        said = [record.getMessage() for record in caplog.records]
        make_kb(**options)
        assert len(caplog.records) == len(said) == 2
    assert all("its catalog is new" in line and f"--gone {kb.id}" in line for line in said)
    assert not any("\n" in line for line in said)


def test_a_new_one_in_a_shared_store_says_nothing(make_kb, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "jaxrag"):
        make_kb("one", store=tmp_path / "store").add(documents("one"))
        make_kb("two", store=tmp_path / "store")
    assert not caplog.records
