"""Readers: what becomes a document, what is reported, and that one never costs another."""

import json
import os

import pytest
from refusal import refused

from jaxrag.base.errors import DocumentError
from jaxrag.library.documents import Document, document_from_mapping, read_paths


def test_folder_is_read_recursively_sorted_without_hidden_entries(tmp_path, read):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x.txt").write_text("hidden")
    (tmp_path / ".y.txt").write_text("hidden")
    (tmp_path / "b.txt").write_text("bee")
    (tmp_path / "a.md").write_text("intro\n# The Title #\ntext")
    (tmp_path / "sub" / "c.txt").write_text("sea")
    good, bad = read(tmp_path)
    assert [d.id for d in good] == ["a.md", "b.txt", "sub/c.txt"]
    assert [d.title for d in good] == ["The Title", "b", "c"]
    assert good[2].file == str(tmp_path / "sub" / "c.txt")
    assert good[2].text == "sea"
    assert bad == []


def test_json_lines_one_document_per_line_and_bad_lines_named(tmp_path, read):
    lines = [
        json.dumps({"text": "one", "id": "first", "title": "T", "year": 1901}),
        "{not json",
        "",
        json.dumps({"text": "two"}),
        json.dumps(["text"]),
        json.dumps({"body": "no text"}),
        json.dumps({"text": 5}),
        json.dumps({"text": "  "}),
        json.dumps({"text": "half \ud800"}),
        json.dumps({"text": "three", "id": 7}),
        '{"text": "x", "score": NaN}',
        '{"text": ' + "[" * 100_000,
    ]
    path = tmp_path / "docs.jsonl"
    path.write_text("\n".join(lines))
    good, bad = read(path)
    assert [(d.id, d.text) for d in good] == [
        ("docs.jsonl/first", "one"),
        ("docs.jsonl:4", "two"),
        ("docs.jsonl/7", "three"),
    ]
    assert good[0].title == "T"
    assert good[0].metadata == {"year": 1901}
    assert [b.source for b in bad] == [f"{path}:{n}" for n in (2, 5, 6, 7, 8, 9, 11, 12)]
    assert all("\n" not in b.reason for b in bad)


def test_undecodable_line_costs_only_itself(tmp_path, read):
    path = tmp_path / "docs.jsonl"
    path.write_bytes(b'{"text": "caf\xe9"}\n{"text": "good"}\n')
    good, bad = read(path)
    assert [d.text for d in good] == ["good"]
    assert bad[0].source == f"{path}:1"


@pytest.mark.parametrize(
    "data",
    [
        "zwölf 灯塔".encode(),
        b"\xef\xbb\xbf" + "zwölf 灯塔".encode(),
        "zwölf 灯塔".encode("utf-16"),
        b"\xfe\xff" + "zwölf 灯塔".encode("utf-16-be"),
    ],
    ids=["utf-8", "utf-8 with mark", "utf-16-le", "utf-16-be"],
)
def test_encodings_that_are_read(tmp_path, data, read):
    (tmp_path / "a.txt").write_bytes(data)
    good, bad = read(tmp_path)
    assert bad == []
    assert good[0].text == "zwölf 灯塔"


def test_line_ends_are_unified(tmp_path, read):
    (tmp_path / "a.txt").write_bytes(b"a\r\nb\rc\n")
    assert read(tmp_path)[0][0].text == "a\nb\nc\n"


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("latin.txt", "café".encode("latin-1"), "byte 3 is not UTF-8"),
        ("image.txt", b"\x89PNG\x00\x00", "byte 0 is not UTF-8"),
        ("zeros.txt", b"abc\x00def", "NUL at character 3"),
        ("cut.txt", "灯".encode("utf-16")[:-1], "not UTF-16"),
        ("empty.txt", b"", "empty"),
        ("blank.md", b" \n\t\n", "empty"),
        ("empty.jsonl", b"\n", "no JSON lines"),
        ("wide.jsonl", '{"text": "x"}'.encode("utf-16"), "UTF-16"),
        ("paper.pdf", b"%PDF", "cannot be parsed as PDF"),
        ("page.odt", b"PK", "not one of .txt, .text, .log"),
        ("a.docx", b"PK", "cannot be parsed as DOCX"),
        ("a.html", b"<p></p><script>x</script>", "holds no text"),
        ("a.html", b"<p>\xe9\xe9\xe9</p>", "byte 3 is not UTF-8"),
        ("a.html", b"<div>" * 3000 + b"x", "nested too deeply"),
        ("a.csv", b"text\n", "no rows"),
        (
            "a.csv",
            "a\n盐井靠人力".encode("gb18030"),
            "bytes are not UTF-8; name the encoding of the file",
        ),
        ("a.csv", b"text,text\n1,2\n", "two columns have one name"),
        ("a.eml", b"Content-Type: image/png\n\nabc", "holds no text"),
        ("a.eml", b"Content-Type: text/plain; charset=klingon\n\nx\xff", "byte 1 is not UTF-8"),
        ("a.ipynb", b"[]", "no notebook of format 4"),
        ("a.ipynb", b'{"cells": [3]}', "without a text for its source"),
        ("a.ipynb", b'{"cells": [], "nbformat": 4}', "holds no cell"),
        ("a.org", b"# comment\n#+TITLE: x\n", "holds no text"),
        ("a.org", b"* A\n<2021-02-30 Tue>\n", "cannot be parsed as Org (ValueError"),
    ],
)
def test_one_bad_file_is_named_and_the_others_are_read(tmp_path, name, data, reason, read):
    for number in range(3):
        (tmp_path / f"good{number}.txt").write_text("good")
    (tmp_path / name).write_bytes(data)
    good, bad = read(tmp_path)
    assert len(good) == 3
    assert [b.source for b in bad] == [str(tmp_path / name)]
    assert reason in bad[0].reason


def test_unusual_entries_are_reported_not_followed(tmp_path, read):
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    good, bad = read(tmp_path)
    assert good == []
    assert {os.path.basename(b.source) for b in bad} == {"loop", "gone.txt", "pipe.txt"}


def test_missing_path_is_refused_before_anything_is_read(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    with refused(DocumentError, "missing.txt"):
        read_paths([tmp_path / "a.txt", tmp_path / "missing.txt"])
    with refused(DocumentError):
        read_paths(str(tmp_path))


@pytest.mark.parametrize(
    "fields",
    [
        {"id": "", "text": "x"},
        {"id": 3, "text": "x"},
        {"id": "a", "text": None},
        {"id": "a", "text": "x", "title": 1},
        {"id": "a", "text": "x", "metadata": {"when": object()}},
        {"id": "a", "text": "x", "metadata": {"n": float("inf")}},
        {"id": "a", "text": "x", "metadata": {1: 2}},
        {"id": "a", "text": "x", "metadata": [1]},
    ],
)
def test_document_refuses_what_could_not_be_kept(fields):
    with pytest.raises(DocumentError) as caught:
        Document(**fields)
    assert "\n" not in str(caught.value)


def test_mapping_without_id_is_named_by_its_text():
    first = document_from_mapping({"text": "same"})
    assert first.id == document_from_mapping({"text": "same", "title": "other"}).id
    assert first.id != document_from_mapping({"text": "not the same"}).id
