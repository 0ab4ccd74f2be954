"""A knowledge base put aside while it is in use, and brought back: nothing that was removed is."""

import contextlib
import itertools
import json
import resource
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.disk import held
from jaxrag.base.errors import KnowledgeBaseError, StoreError
from jaxrag.cli import main
from jaxrag.library.catalog import Catalog
from jaxrag.library.documents import Document
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.library.knowledge_base.backup import MANIFEST, back_up, restore
from jaxrag.library.knowledge_base.location import CATALOG

LOCKS = (0x40000000, 512)  # where SQLite locks a file


def documents(*names, word="amber"):
    return [Document(name, f"{name} {word} birch cedar") for name in names]


def ids(kb):
    return [entry.id for entry in kb.documents()]


def texts(kb):
    return {entry.id: kb.chunks_of(entry.id)[0].text for entry in kb.documents()}


@pytest.fixture
def put_aside(make_kb, tmp_path):
    """``put_aside(**options)``: the folders of a knowledge base of three and of its backup."""

    def make(**options):
        kb = make_kb(**options)
        kb.add(documents("one", "two", "three"))
        back_up(kb.path, tmp_path / "backup")
        kb.close()
        return kb.path, tmp_path / "backup"

    return make


@pytest.fixture
def changed(put_aside, make_kb):
    """The same, of which two was removed since, three changed and four added."""
    folder, backup = put_aside()
    kb = make_kb()
    kb.remove(["two"])
    kb.add([*documents("three", word="ember"), *documents("four")])
    kb.close()
    return folder, backup


def test_all_of_it_comes_back_into_a_new_folder(put_aside, make_kb, tmp_path):
    _, backup = put_aside(store=tmp_path / "store")
    before = make_kb(mode="r")
    want = texts(before), before._catalog.settings(), list(before._catalog.all_keys())
    before.close()
    report = restore(tmp_path / "new", backup)
    assert (report.documents, report.changes, report.kept) == (3, 1, None)
    kb = make_kb("new")
    assert (texts(kb), kb._catalog.settings(), list(kb._catalog.all_keys())) == want
    assert kb.search("two amber", 1)[0].document_id == "two"
    report = kb.verify()
    assert report.rows.whole
    assert (report.ok, report.damaged) == (3, ()), "KV is found by its key"


def test_a_newer_one_is_refused_in_one_line_and_left_as_it_is(changed):
    folder, backup = changed
    before = (folder / CATALOG).read_bytes()
    with refused(KnowledgeBaseError, "2 documents were added or changed since and 1 removed"):
        restore(folder, backup)
    assert (folder / CATALOG).read_bytes() == before
    assert not list(folder.glob(f"{CATALOG}-restored*"))


def test_what_was_removed_since_stays_removed_and_forgotten(changed, make_kb):
    folder, backup = changed
    report = restore(folder, backup, accept_older=True)
    assert (report.removed, report.returned, report.undone) == (("two",), (), 2)
    kb = make_kb()
    assert texts(kb) == {"one": "one amber birch cedar", "three": "three amber birch cedar"}
    assert not [hit for hit in kb.search("two amber", 5) if hit.document_id == "two"]
    assert kb.verify_forgotten("two").removed is not None
    kb.gc(grace_seconds=0)
    (folder / f"{CATALOG}.replaced").unlink()
    assert kb.verify_forgotten("two").nothing
    kb.close()
    for file in folder.glob(f"{CATALOG}*"):
        assert b"two amber" not in file.read_bytes()


def test_it_comes_back_where_that_is_asked_for(changed, make_kb):
    folder, backup = changed
    report = restore(folder, backup, with_removed=True)
    assert (report.removed, report.returned) == ((), ("two",))
    assert ids(make_kb()) == ["one", "three", "two"]


def test_counts_and_ids_go_on(changed, make_kb):
    """Whoever holds the other catalog has the older one now, and no chunk id comes again."""
    folder, backup = changed
    kb = make_kb(mode="r")
    given, known = kb._catalog.chunk_ids().max(), kb.changes
    kb.close()
    report = restore(folder, backup, accept_older=True)
    kb = make_kb()
    assert kb.changes == kb._owners().changes(kb.id) == report.changes == known + 1
    kb.add(documents("five"))
    assert kb._catalog.ids_of_document("five")[0] > given
    kb.close()
    shutil.copy2(report.kept, folder / CATALOG)
    with refused(KnowledgeBaseError, "older than its store"):
        make_kb()


def test_a_damaged_catalog_of_the_same_change_is_replaced(put_aside, make_kb):
    folder, backup = put_aside()
    path = folder / CATALOG
    damaged = bytearray(path.read_bytes())
    damaged[200] ^= 1
    path.write_bytes(damaged)
    report = restore(folder, backup)
    assert report.changes == 1
    assert (folder / f"{CATALOG}.replaced").read_bytes() == damaged
    assert ids(make_kb()) == ["one", "three", "two"]


@pytest.mark.parametrize("lost", ["damaged", "empty", "gone", "older"])
def test_where_nothing_tells_what_was_removed_it_is_refused(changed, make_kb, tmp_path, lost):
    folder, backup = changed
    path = folder / CATALOG
    if lost == "damaged":
        path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    elif lost == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    if lost == "older":
        with make_kb("kb2", store=folder) as other:
            assert other.id
        restore(folder, backup, with_removed=True)
        shutil.copy2(backup / "catalog.backup", path)
    for options in ({}, {"accept_older": True}):
        with refused(KnowledgeBaseError, "nothing tells what was removed"):
            restore(folder, backup, **options)
    restore(folder, backup, with_removed=True)
    assert ids(make_kb()) == ["one", "three", "two"]


def test_another_knowledge_base_is_never_replaced(put_aside, make_kb, tmp_path):
    _, backup = put_aside()
    other = make_kb("other")
    other.close()
    with refused(KnowledgeBaseError, "name another folder"):
        restore(tmp_path / "other", backup, with_removed=True)


def test_one_that_is_open_is_left_alone(put_aside, make_kb):
    folder, backup = put_aside()
    with make_kb(mode="r"), refused(KnowledgeBaseError, "open in this process"):
        restore(folder, backup)
    hold = (  # as SQLite in another process
        "import fcntl, sys; file = open(sys.argv[1], 'rb'); "
        f"fcntl.lockf(file, fcntl.LOCK_SH, {LOCKS[1]}, {LOCKS[0]}); print(flush=True); input()"
    )
    command = [sys.executable, "-I", "-S", "-c", hold, str(folder / CATALOG)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        other.stdout.readline()
        with refused(KnowledgeBaseError, "no process has it open"):
            restore(folder, backup)
        other.communicate("\n")
    restore(folder, backup)


def test_every_flipped_bit_of_a_backup_is_refused(put_aside, tmp_path):
    _, backup = put_aside()
    generator = np.random.default_rng(5)
    for name in ("catalog.backup", MANIFEST):
        path = backup / name
        whole = path.read_bytes()
        for _ in range(20):
            changed = bytearray(whole)
            changed[generator.integers(len(whole))] ^= 1 << int(generator.integers(8))
            path.write_bytes(changed)
            try:
                report = restore(tmp_path / "new", backup)
            except (StoreError, KnowledgeBaseError) as error:
                assert "\n" not in str(error)
            else:
                assert name == MANIFEST and report.documents == 3, "a remark of the manifest"
                shutil.rmtree(tmp_path / "new")
            assert not (tmp_path / "new" / CATALOG).exists()
        path.write_bytes(whole)
    assert restore(tmp_path / "new", backup).documents == 3


def test_it_is_of_one_moment_while_others_write(put_aside, tmp_path):
    folder, _ = put_aside()
    ready, leave = threading.Event(), threading.Event()

    def write():
        with contextlib.closing(Catalog.open(folder / CATALOG)) as catalog:
            for number in itertools.count():
                catalog.set("gate:first", number)
                catalog.set("gate:second", number)
                catalog.checkpoint()
                ready.set()
                if leave.is_set():
                    return

    writer = threading.Thread(target=write)
    writer.start()
    seen = []
    for number in range(4):
        ready.clear()
        assert ready.wait(60), "it writes between two backups"
        back_up(folder, tmp_path / f"b{number}")
        restore(tmp_path / f"new{number}", tmp_path / f"b{number}")
        with KnowledgeBase.open(tmp_path / f"new{number}") as kb:
            assert ids(kb) == ["one", "three", "two"]
            settings = kb._catalog.settings()
            assert settings["gate:second"] <= settings["gate:first"] <= settings["gate:second"] + 1
            seen.append(settings["gate:first"])
    leave.set()
    writer.join()
    assert seen == sorted(set(seen))


@pytest.fixture
def of_server(make_kb, tmp_path):
    """A knowledge base of a server, of which there is a backup, and the folder of its uploads."""
    kb = make_kb("data/tenants/acme/stores/vs_1")
    kb.add([Document("file-a1/notes.md", "amber"), Document("file-b2/notes.md", "birch")])
    kb.close()
    files = tmp_path / "data/tenants/acme/files"
    files.mkdir(parents=True)
    for name in ("file-a1", "file-b2", "file-c3"):
        (files / name).write_text(name)
    assert main(["kb", "backup", str(kb.path), str(tmp_path / "backup")]) == 0
    return kb, files


def test_uploads_come_along_and_go_where_they_lack(of_server, tmp_path):
    kb, files = of_server
    found = sorted(file.name for file in (tmp_path / "backup" / "uploads").iterdir())
    assert found == ["file-a1", "file-b2"], "file-c3 is of no document here"
    (files / "file-a1").unlink()
    (files / "file-b2").write_text("newer")
    report = restore(kb.path, tmp_path / "backup", uploads=files)
    assert report.uploads == 1
    assert (files / "file-a1").read_text() == "file-a1"
    assert (files / "file-b2").read_text() == "newer"


@pytest.mark.parametrize("lost", ["flipped", "dropped", "named otherwise"])
def test_nothing_is_done_where_an_upload_of_the_backup_is_not_whole(of_server, tmp_path, lost):
    kb, files = of_server
    shutil.rmtree(files)
    upload, manifest = tmp_path / "backup/uploads/file-b2", tmp_path / "backup" / MANIFEST
    if lost == "flipped":
        upload.write_text("file-b3")
    elif lost == "dropped":
        upload.unlink()
    else:
        manifest.write_text(manifest.read_text().replace("file-b2", "file-b3"))
    with refused(StoreError, "is not as it was written"):
        restore(kb.path, tmp_path / "backup", uploads=files)
    assert not files.exists()
    assert not (kb.path / f"{CATALOG}.replaced").exists()


def test_uploads_that_have_no_place_are_told(of_server, tmp_path, capsys):
    assert main(["kb", "restore", str(tmp_path / "plain"), str(tmp_path / "backup")]) == 0
    assert "2 uploads left in the backup" in capsys.readouterr().out


def test_what_an_earlier_restore_kept_stays(changed, make_kb):
    """Who runs it twice has the newest documents in the first of the files that are kept."""
    folder, backup = changed
    newest = (folder / CATALOG).read_bytes()
    kept = [restore(folder, backup, accept_older=True).kept for _ in range(3)]
    assert kept == [f"{folder / CATALOG}.replaced{end}" for end in ("", "-2", "-3")]
    assert (folder / f"{CATALOG}.replaced").read_bytes() == newest


def test_it_stays_sealed_as_it_is_now(put_aside, make_kb):
    folder, backup = put_aside()
    make_kb(secret=bytes(16), reseal=True).close()
    restore(folder, backup)
    with refused(KnowledgeBaseError, "is sealed"):
        make_kb()
    assert ids(make_kb(secret=bytes(16))) == ["one", "three", "two"]


def test_two_at_once_and_one_that_is_made_meanwhile(put_aside, tmp_path, monkeypatch):
    from jaxrag.library.knowledge_base import backup as room

    folder, backup = put_aside()
    with held(folder, "restore"), refused(StoreError, "another restore"):
        restore(folder, backup)
    merged, new = room._merged, tmp_path / "new"

    def made_meanwhile(*args):
        Catalog.create(new / CATALOG, {"id": "another"}).close()
        return merged(*args)

    monkeypatch.setattr(room, "_merged", made_meanwhile)
    with refused(KnowledgeBaseError, "is in use"):
        restore(new, backup)
    with contextlib.closing(Catalog.open(new / CATALOG)) as catalog:
        assert catalog.settings() == {"id": "another"}


def test_what_is_wrong_is_named(put_aside, tmp_path, capsys):
    folder, backup = put_aside()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10 << 12, hard))
    try:
        with refused(StoreError, f"{tmp_path / 'full' / 'catalog.backup'} cannot be written"):
            back_up(folder, tmp_path / "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for command in ("backup", "restore"):
        assert main(["kb", command, str(folder), "s3://bucket/monday"]) == 1
        assert "s3://bucket/monday: a knowledge base needs a local" in capsys.readouterr().err
    (backup / "catalog.backup").unlink()
    with refused(StoreError, f"{backup / 'catalog.backup'} is not as it was written"):
        restore(folder, backup)


def test_the_commands_say_what_they_did(changed, capsys, tmp_path):
    folder, backup = map(str, changed)
    assert main(["kb", "backup", folder, str(tmp_path / "second"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["documents"], told["changes"], told["uploads"]) == (3, 3, 0)
    assert main(["kb", "backup", folder, str(tmp_path / "second")]) != 0
    assert "is not empty" in capsys.readouterr().err
    assert main(["kb", "restore", folder, backup]) != 0
    assert "--accept-older" in capsys.readouterr().err
    assert main(["kb", "restore", folder, backup, "--accept-older"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "1 document removed since: left out: two" in lines
    assert (
        main(["kb", "restore", folder, str(tmp_path / "second"), "--with-removed", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["documents"] == 3


def test_who_is_killed_leaves_one_of_the_two(changed, make_kb, monkeypatch):
    """In front of and behind the moment when the file takes its place."""
    from jaxrag.library.knowledge_base import backup as room

    class DiedError(BaseException):
        """In place of the process."""

    def die(*args, **named):
        raise DiedError

    folder, backup = changed
    with monkeypatch.context() as patched:
        patched.setattr(room, "replace", die)
        with pytest.raises(DiedError):
            restore(folder, backup, accept_older=True)
    kb = make_kb()
    assert ids(kb) == ["four", "one", "three"]
    kb.close()
    with monkeypatch.context() as patched:
        patched.setattr(room.Owners, "acknowledge", die)
        with pytest.raises(DiedError):
            restore(folder, backup, accept_older=True)
    kb = make_kb()
    assert ids(kb) == ["one", "three"]
    kb.add(documents("five"))
    assert kb.changes == kb._owners().changes(kb.id)


def test_who_may_read_the_catalog_stays_as_it_was(put_aside):
    folder, backup = put_aside()
    (folder / CATALOG).chmod(0o640)
    restore(folder, backup)
    assert (folder / CATALOG).stat().st_mode & 0o777 == 0o640
    assert (backup / "catalog.backup").stat().st_mode & 0o077 == 0, "a backup is private"
