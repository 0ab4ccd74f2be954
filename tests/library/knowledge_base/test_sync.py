"""`sync`: what has left its files leaves the knowledge base, and nothing else does."""

import json
import os

import pytest
from refusal import refused

from jaxrag.base.errors import DocumentError, KnowledgeBaseError
from jaxrag.cli import main
from jaxrag.library.documents import read_paths
from jaxrag.library.knowledge_base import KnowledgeBase


@pytest.fixture
def kb(make_kb):
    return make_kb()


@pytest.fixture
def folder(tmp_path):
    """``folder("a.txt", "sub/b.txt")``: a folder ``docs`` with these files."""

    def make(*names, under="docs"):
        for name in names:
            path = tmp_path / under / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{under} {name} amber birch")
        return tmp_path / under

    return make


def ids(kb):
    return {entry.id for entry in kb.documents()}


def test_a_file_that_is_gone_leaves_with_its_chunks(kb, folder):
    docs = folder("a.txt", "sub/b.txt", "c.txt")
    kb.sync([docs])
    kb.add(["by hand, cedar"])
    (docs / "a.txt").unlink()
    (docs / "c.txt").write_text("cedar delta")
    plain = kb.add(read_paths([docs]))
    assert (plain.gone, plain.removed) == (("a.txt",), ())
    assert kb.gone([docs]).ids == ("a.txt",)
    assert "a.txt" in ids(kb)
    report = kb.sync([str(docs)])
    assert (report.removed, report.gone, report.documents) == (("a.txt",), (), 2)
    assert len(ids(kb)) == 3 and "a.txt" not in ids(kb)
    assert all(hit.document_id != "a.txt" for hit in kb.search("amber", 10))
    assert kb.verify().whole


def test_rows_that_were_taken_out_leave(kb, tmp_path):
    table = tmp_path / "rows.jsonl"
    lines = [json.dumps({"id": name, "text": f"amber {name}"}) for name in "abc"]
    table.write_text("\n".join(lines))
    kb.sync([table])
    table.write_text("\n".join((lines[0], "no JSON")))
    report = kb.sync([table])  # it may be one of the lines that cannot be read
    assert (report.removed, report.kept, len(report.skipped)) == ((), 2, 1)
    table.write_text("\n".join((lines[0], lines[2])))
    assert kb.sync([table]).removed == ("rows.jsonl/b",)
    assert ids(kb) == {"rows.jsonl/a", "rows.jsonl/c"}


@pytest.mark.parametrize("empty", [False, True])
def test_an_empty_or_missing_folder_removes_nothing_unless_that_is_meant(kb, folder, empty):
    docs = folder("a.txt", "disk/b.txt", "disk/c.txt")
    kb.sync([docs])
    (docs / "disk" / "b.txt").unlink()
    (docs / "disk" / "c.txt").rename(docs / "disk" / ".c.txt")  # a hidden file fills no folder
    report = kb.sync([docs], empty=empty)
    both = ("disk/b.txt", "disk/c.txt")
    assert (report.removed, report.gone) == ((both, ()) if empty else ((), both))
    docs.rename(docs.with_name("moved"))
    if empty:
        assert kb.sync([docs], empty=True).removed == ("a.txt",)
        assert ids(kb) == set()
    else:
        with refused(DocumentError):
            kb.sync([docs])
        docs.mkdir()
        assert kb.sync([docs]).removed == ()
        assert len(ids(kb)) == 3


def test_a_folder_that_went_with_its_files_is_gone(kb, folder):
    docs = folder("a.txt", "sub/deep/b.txt")
    kb.sync([docs])
    (docs / "sub/deep/b.txt").unlink()
    (docs / "sub/deep").rmdir()
    assert kb.gone([docs]).doubtful == ("sub/deep/b.txt",)
    (docs / "sub").rmdir()
    assert kb.sync([docs]).removed == ("sub/deep/b.txt",)


def test_unreadable_files_keep_their_documents(kb, folder):
    docs = folder("a.txt", "b.txt", "c.txt")
    kb.sync([docs])
    (docs / "a.txt").write_bytes(b"\xff\xfe\x00\xd8")
    (docs / "b.txt").unlink()
    report = kb.sync([docs])
    assert report.removed == ("b.txt",)
    assert (report.kept, len(report.skipped)) == (1, 1)
    assert ids(kb) == {"a.txt", "c.txt"}


def test_other_folders_stay_though_their_files_have_equal_names(kb, folder):
    left, right = folder("a.txt", "b.txt", under="left"), folder("a.txt", "c.txt", under="right")
    kb.sync([left])
    assert len(kb.sync([right]).skipped) == 1  # a.txt is the left one's
    (left / "a.txt").unlink()
    (right / "c.txt").unlink()
    folder("left-over.txt", under="left-over")
    assert kb.sync([left]).removed == ("a.txt",)
    assert ids(kb) == {"b.txt", "c.txt"}
    assert kb.sync([right]).removed == ("c.txt",)
    assert [entry.file for entry in kb.documents() if entry.id == "a.txt"] == [
        os.path.realpath(right / "a.txt")
    ]


def test_a_folder_read_under_another_root_is_held_once(kb, folder, tmp_path):
    docs = folder("a.txt")
    kb.sync([docs])
    report = kb.sync([docs.parent / "docs" / ".."])
    assert report.removed == ("a.txt",)
    assert "docs/a.txt" in ids(kb)


def test_an_ended_run_is_finished_by_the_next(kb, folder, monkeypatch):
    docs = folder("a.txt", "b.txt")
    kb.sync([docs])
    (docs / "a.txt").unlink()
    folder("c.txt")

    def die(ids):
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(kb._catalog, "remove", die)
        with pytest.raises(RuntimeError):
            kb.sync([docs])
    assert ids(kb) == {"a.txt", "b.txt", "c.txt"}
    report = kb.sync([docs])
    assert (report.unchanged, report.removed) == (2, ("a.txt",))


def test_a_part_of_several_says_nothing_of_what_is_gone(kb, folder):
    docs = folder("a.txt", "b.txt", "c.txt")
    kb.sync([docs])
    (docs / "a.txt").unlink()
    report = kb.add(read_paths([docs]), shard=(0, 2))
    assert (report.gone, report.removed, report.kept) == ((), (), 0)


def test_reading_removes_nothing(kb, folder, tmp_path):
    docs = folder("a.txt", "b.txt")
    kb.sync([docs])
    (docs / "a.txt").unlink()
    with KnowledgeBase.open(tmp_path / "kb", mode="r") as reader:
        assert reader.gone([docs]).ids == ("a.txt",)
        with refused(KnowledgeBaseError):
            reader.sync([docs])


def test_the_command_counts_and_warns(tmp_path, folder, model_dir, capsys):
    docs = folder("a.txt", "b.txt", "c.txt")
    call = ["ingest", str(docs), "--kb", str(tmp_path / "cli")]

    def run(*options):
        capsys.readouterr()
        code = main([*call, *options])
        out, err = capsys.readouterr()
        return code, out, err

    made = ["--model", str(model_dir), "--template", "plain"]
    assert run(*made, "--chunk-tokens", "64")[0] == 0
    (docs / "a.txt").unlink()
    assert "1 document no longer in the files: --sync removes them" in run()[1]
    code, out, _ = run("--sync", "--dry-run")
    assert (code, out.splitlines()) == (0, [
        "would remove a.txt",
        "would add 0 documents and replace 0 (2 unchanged), and encode 0 of 2 chunks",
        "would remove 1 document",
        "nothing was changed",
    ])  # fmt: skip
    (docs / "d.txt").write_text("Wells of the north")
    assert (
        "would add 1 document and replace 0 (2 unchanged), and encode 1 of 3" in run("--dry-run")[1]
    )
    (docs / "d.txt").unlink()
    assert json.loads(run("--sync", "--json")[1])["removed"] == ["a.txt"]
    for name in "bc":
        (docs / f"{name}.txt").unlink()
    assert "kept 2 documents of missing paths and empty folders" in run("--sync")[1]
    assert json.loads(run("--sync", "--dry-run", "--sync-empty", "--json")[1])["removed"] == [
        "b.txt", "c.txt",
    ]  # fmt: skip
    assert "removed 2 documents" in run("--sync", "--sync-empty")[1]
    for options, words in (
        (["--sync-empty"], "--sync-empty is about --sync"),
        (["--sync", "--shard", "0/2"], "--sync needs all documents"),
    ):
        code, _, err = run(*options)
        assert (code, words in err) == (1, True)


def test_a_dry_run_opens_what_is_sealed(tmp_path, folder, model_dir, capsys):
    docs, secret = folder("a.txt", "b.txt"), tmp_path / "secret"
    secret.write_bytes(b"sixteen bytes or more")
    call = ["ingest", str(docs), "--kb", str(tmp_path / "cli"), "--secret-file", str(secret)]
    made = ["--model", str(model_dir), "--template", "plain", "--chunk-tokens", "64"]
    assert main([*call, *made]) == 0
    (docs / "a.txt").unlink()
    capsys.readouterr()
    assert main([*call, "--sync", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["removed"] == ["a.txt"]


def test_pictures_are_counted_and_no_failure(tmp_path, folder, model_dir, capsys):
    docs = folder("a.txt", "b.png", "sub/c.jpg")
    made = ["--model", str(model_dir), "--template", "plain", "--chunk-tokens", "64"]
    assert main(["ingest", str(docs), "--kb", str(tmp_path / "cli"), *made]) == 0
    out, err = capsys.readouterr()
    assert "passed over 2 files without text" in out
    assert "skipped" not in err
    (docs / "d.tex").write_text("\\section{Wells}")
    assert main(["ingest", str(docs), "--kb", str(tmp_path / "cli")]) == 3
