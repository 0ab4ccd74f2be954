"""Uploads and the registry: acknowledged is there, whole; all else is swept."""

import contextlib
import sqlite3

import pytest
from refusal import refused

from jaxrag.base.errors import StoreError
from jaxrag.server.durable import REGISTRY, UNFINISHED, write_durably
from jaxrag.server.state.quota import Quota
from jaxrag.server.state.registry import Registry
from jaxrag.server.state.uploads import Uploads, plain_name
from jaxrag.server.tenants import Tenants


@pytest.fixture
def registry(tmp_path):
    with contextlib.closing(Registry(tmp_path)) as opened:
        yield opened


@pytest.fixture
def uploads(tmp_path, registry):
    return uploads_of(tmp_path, registry)


def uploads_of(folder, registry):
    return Uploads(folder, registry, Quota(registry, Tenants.open(None, None), lambda _: folder))


def kept(uploads, tenant="acme", data=b"text", name="a.txt"):
    upload = uploads.begin(tenant)
    upload.write(data)
    return upload.finish(name, "assistants")


def test_an_upload_is_there_only_once_it_is_finished(uploads, registry):
    upload = uploads.begin("acme")
    upload.write(b"half of it")
    assert registry.files("acme") == []
    assert [it.name[: len(UNFINISHED)] for it in uploads.folder("acme").iterdir()] == [UNFINISHED]
    upload.abort()
    assert not list(uploads.folder("acme").iterdir())
    file = kept(uploads)
    assert uploads.path(file).read_bytes() == b"text"
    assert registry.files("acme") == registry.files() == [file]
    assert registry.files("blue") == [] and registry.file("blue", file.id) is None


def test_what_was_not_acknowledged_is_swept(tmp_path, uploads, registry):
    """As after a kill: a file half written, one renamed and not known, one forgotten first."""
    file, gone = kept(uploads), kept(uploads, "")
    registry.remove_file(gone.id)
    (uploads.folder("acme") / f"{UNFINISHED}1").write_bytes(b"ha")
    (uploads.folder("acme") / "file-unknown").write_bytes(b"whole")
    registry.close()
    with contextlib.closing(Registry(tmp_path)) as again:
        assert uploads_of(tmp_path, again).sweep() == 3
        assert again.files() == [file]
    assert [path.name for path in (tmp_path / "tenants").rglob("files/*")] == [file.id]


def test_a_disk_that_is_full_leaves_nothing(uploads, registry, monkeypatch):
    upload = uploads.begin("acme")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jaxrag.server.state.uploads.os.fsync", full)
    with refused(StoreError):
        upload.finish("a.txt", "assistants")
    upload.abort()
    assert registry.files() == [] and not list(uploads.folder("acme").iterdir())


def test_members_go_from_in_progress_to_an_end_and_once(registry):
    [member] = registry.put_members("vs_1", [("file-1", {"a": 1})], "acme", "batch")
    assert (member.status, member.attributes, member.batch) == ("in_progress", {"a": 1}, "batch")
    assert registry.members(status="in_progress") == [member]
    assert registry.settle_member(member.number, "completed", counts={"chunks": 3})
    assert not registry.settle_member(member.number, "failed")
    assert registry.member("vs_1", "file-1").counts == {"chunks": 3}
    [again] = registry.put_members("vs_1", [("file-1", {})], "acme")
    assert again.number > member.number and not registry.settle_member(member.number, "failed")
    registry.put_members("vs_1", [("file-2", {})], "acme")
    assert registry.counts("vs_1")["in_progress"] == registry.counts("vs_1")["total"] == 2
    assert registry.counts("vs_1", "batch")["total"] == 0
    registry.remove_file("file-1")
    assert [it.file for it in registry.members("vs_1")] == ["file-2"]
    registry.remove_store("vs_1")
    assert registry.members("vs_1") == []


def test_vector_stores_are_those_of_a_tenant(registry):
    store = registry.add_store("vs_1", "acme", "notes", {"a": "b"})
    assert registry.store("acme", "vs_1") == store and registry.store("blue", "vs_1") is None
    registry.change_store("vs_1", "other", {}, None)
    assert (registry.stores("acme")[0].name, registry.stores("blue")) == ("other", [])


def test_what_is_empty_counts_all_the_same(registry):
    for number, size in enumerate((0, 0, 5)):
        registry.add_file(f"file-{number}", "acme", "a.txt", size, "assistants")
    assert registry.bytes_of_tenant("acme") == 1 + 1 + 5


def test_uses_of_a_store_are_known_at_once_and_written_together(registry):
    now = [1000.0]
    registry.clock = lambda: now[0]
    for name in ("vs_1", "vs_2"):
        registry.add_store(name, "acme", name, {}, 1)
    changes = registry._connection.total_changes
    for now[0] in (2000.0, 3000.0):
        registry.use_store("vs_1")
        assert registry.store("acme", "vs_1").active == now[0]
    assert registry._connection.total_changes == changes
    registry.write_uses()
    assert registry._connection.total_changes == changes + 1
    registry.write_uses()
    assert registry._connection.total_changes == changes + 1
    now[0] = 1000.0 + 86400
    assert [registry.is_expired(it) for it in registry.stores()] == [False, True]
    registry.expire_store("vs_2")
    now[0] = 1000.0  # a clock that is set back brings nothing back
    assert [registry.is_expired(it) for it in registry.stores()] == [False, True]
    registry.use_store("vs_3")  # one that is gone
    registry.write_uses()
    assert [it.id for it in registry.stores()] == ["vs_1", "vs_2"]


def test_one_of_another_format_is_refused_and_left_alone(tmp_path, registry):
    registry.close()
    with contextlib.closing(sqlite3.connect(tmp_path / REGISTRY)) as connection:
        connection.execute("PRAGMA user_version = 7")
    before = (tmp_path / REGISTRY).read_bytes()
    with refused(StoreError, REGISTRY):
        Registry(tmp_path)
    assert (tmp_path / REGISTRY).read_bytes() == before


def test_another_file_in_its_place_is_refused(tmp_path):
    with contextlib.closing(sqlite3.connect(tmp_path / REGISTRY)) as connection:
        connection.execute("CREATE TABLE t (x)")
    with refused(StoreError, "1"):
        Registry(tmp_path)
    write_durably(tmp_path / "other" / REGISTRY, b"no database at all")
    with refused(StoreError):
        Registry(tmp_path / "other")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("a.txt", "a.txt"),
        ("../../etc/passwd", "passwd"),
        ("C:\\docs\\a.pdf", "a.pdf"),
        ("a\n\x00b.txt", "ab.txt"),
        ("..", ""),
        ("a/", ""),
        ("/etc/passwd", "passwd"),
        ("TCP/IP.md", "TCP_IP.md"),
        ('q"uote;x=.md', 'q"uote;x=.md'),
        ("two\r\nlines.md", "twolines.md"),
        ("x" * 300 + ".html", "x" * 250 + ".html"),
        ("x" * 300, "x" * 255),
    ],
)
def test_names_of_files_are_plain(given, name):
    assert plain_name(given) == name
