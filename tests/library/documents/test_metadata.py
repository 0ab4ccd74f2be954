"""Where metadata comes from, and of which type it is."""

import json

import pytest
from refusal import refused

from jaxrag.base.errors import DocumentError
from jaxrag.library.documents import Document, document_from_mapping
from jaxrag.library.documents.left_out import LeftOut
from jaxrag.library.documents.metadata import MAX_FRONT_CHARACTERS, front_matter, typed


def test_a_column_is_typed_as_a_whole(tmp_path, read):
    (tmp_path / "a.csv").write_text(
        "text,year,price,draft,zip,day,mixed,gap,none\n"
        "one,2019, 1.5,true,01234,2019-01-02,1,7,\n"
        "two,2021,2,FALSE,90210,2021-12-31,x,,\n"
    )
    good, bad = read(tmp_path)
    assert bad == []
    assert [d.metadata for d in good] == [
        {"year": 2019, "price": 1.5, "draft": True, "zip": "01234", "day": "2019-01-02",
         "mixed": "1", "gap": 7, "none": ""},
        {"year": 2021, "price": 2.0, "draft": False, "zip": "90210", "day": "2021-12-31",
         "mixed": "x", "none": ""},
    ]  # fmt: skip
    assert isinstance(good[1].metadata["price"], float)


def test_ids_of_tables_have_their_file_in_front(tmp_path, read):
    (tmp_path / "a.tsv").write_text("id\ttitle\ttext\n1\t2\t3\n")
    (tmp_path / "b.tsv").write_text("id\ttitle\ttext\n1\t2\t3\n")
    first, second = read(tmp_path)[0]
    for found, name in ((first, "a.tsv/1"), (second, "b.tsv/1")):
        assert (found.id, found.title, found.text, found.metadata) == (name, "2", "3", {})


def test_a_row_that_is_left_out_does_not_decide_a_type(tmp_path, read):
    (tmp_path / "a.csv").write_text("text,n\ngood,1\nx,three,cells\n ,\n")
    good, bad = read(tmp_path)
    assert (good[0].metadata, len(bad)) == ({"n": 1}, 2)


def test_a_table_that_breaks_off_has_the_types_of_what_it_holds(tmp_path, read):
    data = "text,n\none,1\n".encode("utf-16") + b"x"
    (tmp_path / "a.csv").write_bytes(data)
    good, bad = read(tmp_path)
    assert [d.metadata for d in good] == [{"n": 1}]
    assert "UTF-16 to its end" in bad[0].reason


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0), ("-12", -12), ("1.50", 1.5), ("1e3", 1000.0), ("True", True),
        ("007", "007"), ("+5", "+5"), ("1_000", "1_000"), ("1,000", "1,000"), (".5", ".5"),
        ("nan", "nan"), ("inf", "inf"), ("1e999", "1e999"), ("9" * 30, "9" * 30), ("٣", "٣"),
        ("2021-03-04", "2021-03-04"), ("no", "no"), ("12:30", "12:30"), ("", ""),
    ],
)  # fmt: skip
def test_what_spells_a_number(text, value):
    assert typed(text) == value
    assert type(typed(text)) is type(value)
    if text and not isinstance(value, float):
        assert front_matter(f"---\nx: {text}\n---\ny", LeftOut())[0] == {"x": value}


def test_metadata_of_records_is_taken_out_of_its_object():
    nested = {"text": "x", "id": "a", "year": 2020, "metadata": {"author": "Bo", "tags": ["a"]}}
    assert document_from_mapping(nested).metadata == {"year": 2020, "author": "Bo", "tags": ["a"]}
    assert document_from_mapping({"text": "x", "metadata": "old"}).metadata == {"metadata": "old"}
    with refused(DocumentError, '"year"'):
        document_from_mapping({"text": "x", "year": 1, "metadata": {"year": 2}})


YAML = """---
# a comment
title: Salt wells
year: 2021
Date published: 2021-03-04
tags: [brine, "007", 007]
open: no
nested: {a: 1.5, b: null}
---
# Heading

Text.
"""
TOML = """+++
title = "Salt wells"
year = 2021
day = 2021-03-04
+++
Text.
"""


def test_front_matter_is_metadata_and_no_text(tmp_path, read):
    (tmp_path / "a.md").write_text(YAML)
    (tmp_path / "b.md").write_bytes(TOML.replace("\n", "\r\n").encode())
    (tmp_path / "c.txt").write_text(TOML)
    (a, b, c), bad = read(tmp_path)
    assert bad == []
    assert (a.title, a.text) == ("Salt wells", "# Heading\n\nText.\n")
    assert a.metadata == {
        "year": 2021, "Date published": "2021-03-04", "tags": ["brine", "007", "007"],
        "open": "no", "nested": {"a": 1.5, "b": None},
    }  # fmt: skip
    assert (b.title, b.text) == ("Salt wells", "Text.\n")
    assert b.metadata == {"year": 2021, "day": "2021-03-04"}
    assert (c.text, c.metadata) == (TOML, {})


@pytest.mark.parametrize(
    "text",
    [
        "---\na rule, and prose\n---\nmore",
        "---\nkey: no end",
        "text\n---\nkey: 1\n---\n",
        "---",
        "",
    ],
)
def test_rules_and_prose_are_text(text):
    assert front_matter(text, LeftOut()) == ({}, text)


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        ("a: &x [1]\nb: *x", "alias"),
        ("a: " + "[" * 60_000, "nests more than 32 deep"),
        ("a: [1\ngroups:\n- us", "has groups and is not YAML"),
        ("a: !!binary aGk=", "metadata is not JSON"),
        ("a: " + "x" * MAX_FRONT_CHARACTERS, "front matter holds"),
    ],
)
def test_front_matter_that_cannot_be_read_is_named(tmp_path, read, head, reason):
    (tmp_path / "a.md").write_text(f"---\n{head}\n---\ntext")
    good, bad = read(tmp_path)
    assert (good, len(bad)) == ([], 1)
    assert reason in bad[0].reason


@pytest.mark.parametrize(
    ("head", "found"),
    [
        ("---\na: b: c", {"a": "b: c"}),
        ("---\na: !!python/object/apply:os.getcwd []", {"a": "!!python/object/apply:os.getcwd []"}),
        ("---\na: [1\nyear: 2021", {"a": "[1", "year": 2021}),
        ("---\n1: 2", {"1": 2}),
        ("+++\na = b\nn = 3", {"a": "b", "n": 3}),
    ],
)
def test_front_matter_of_another_form_is_read_by_its_lines(head, found):
    left_out = LeftOut()
    assert front_matter(f"{head}\n{head[:3]}\ntext", left_out) == (found, "text")
    assert left_out.counts == {"front matters read line by line": 1}


def test_pages_tell_of_themselves(tmp_path, read):
    (tmp_path / "a.html").write_text(
        '<html lang="de"><head><title>Salz</title><meta charset="utf-8">'
        '<meta name="Author" content=" Bo  K. "><meta name=year content=2021>'
        '<meta name="viewport" content="width=1"><meta name="author" content="second">'
        f'<meta name="long" content="{"x" * 2001}"><meta name="none">'
        '<meta property="og:title" content="x"></head><p>Text.'
    )
    [page] = read(tmp_path)[0]
    assert isinstance(page, Document)
    assert (page.title, page.text) == ("Salz", "Text.")
    assert page.metadata == {"lang": "de", "author": "Bo K.", "year": 2021}


def test_a_page_gives_only_so_many_names(tmp_path, read):
    metas = "".join(f'<meta name="n{i}" content="{i}">' for i in range(100))
    (tmp_path / "a.html").write_text(f"<head>{metas}</head><p>Text.")
    [page] = read(tmp_path)[0]
    assert len(page.metadata) == 64
    assert json.dumps(page.metadata)


def test_groups_of_files(tmp_path, read):
    (tmp_path / "a.md").write_text("---\ngroups: [sales, legal.eu]\n---\namber", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "birch", "groups": ["sales"]}', encoding="utf-8")
    (tmp_path / "c.md").write_text("---\ngroups: sales\n---\ncedar", encoding="utf-8")
    good, (bad,) = read(tmp_path)
    assert [it.metadata["groups"] for it in good] == [["sales", "legal.eu"], ["sales"]]
    assert "groups='sales': expected a list" in bad.reason
