"""Readers of .json, .csv and .tsv: one document an object or row, a bad one costs only itself."""

import io
import json
from pathlib import Path

import pytest

from jaxrag.library.documents import BadDocument, Document, delimited, files, records
from jaxrag.library.documents.delimited import read_table
from jaxrag.library.documents.files import File, ReadOptions


def test_json_holds_a_list_an_object_or_documents(tmp_path, read):
    one = {"text": "one", "id": "first", "year": 1901}
    (tmp_path / "a.json").write_text(json.dumps([one, {"text": "two"}]))
    (tmp_path / "b.json").write_text(json.dumps({"text": "three"}))
    (tmp_path / "c.json").write_text(json.dumps({"documents": [{"text": "four"}], "version": 2}))
    good, bad = read(tmp_path)
    assert bad == []
    assert [(d.id, d.text) for d in good] == [
        ("a.json/first", "one"),
        ("a.json[1]", "two"),
        ("b.json", "three"),
        ("c.json[0]", "four"),
    ]
    assert good[0].metadata == {"year": 1901}


@pytest.mark.parametrize(
    ("content", "where", "reason"),
    [
        ("{", "", "not JSON"),
        ("3", "", "holds a int"),
        ('{"body": "x"}', "", 'key "text" is missing (keys: body)'),
        ('[{"text": "good"}, {"text": " "}]', "[1]", "empty"),
        ('[{"text": "good"}, "x"]', "[1]", "holds a str"),
        ('[{"text": "good"}, {"text": "x", "note": "\\ud800"}]', "[1]", "surrogate"),
        ("[" * 100_000, "", "not JSON"),
    ],
)
def test_bad_json_is_named(tmp_path, read, content, where, reason):
    path = tmp_path / "a.json"
    path.write_text(content)
    good, bad = read(path)
    assert [d.text for d in good] == (["good"] if where else [])
    assert [b.source for b in bad] == [f"{path}{where}"]
    assert reason in bad[0].reason


def test_key_of_the_text_can_be_named(tmp_path, read):
    (tmp_path / "a.json").write_text('{"abstract": "one", "text": 5}')
    (tmp_path / "b.jsonl").write_text('{"abstract": "two"}\n{"text": "three"}\n')
    (tmp_path / "c.csv").write_text("text,abstract\nx,four\n")
    good, bad = read(tmp_path, text_field="abstract")
    assert [d.text for d in good] == ["one", "two", "four\n\ntext: x"]
    assert good[0].metadata == {"text": 5}
    assert good[2].metadata == {"text": "x"}
    assert '"abstract" is missing' in bad[0].reason


def test_rows_become_documents_with_the_other_columns_as_metadata(tmp_path, read):
    path = tmp_path / "a.csv"
    path.write_text(
        "\ufeffid,title,year, content \n"
        'w,Wells,1901,"Salt, and ""more"".\r\nSecond line"\n'
        "b,,1950,Bridge\n\n"
    )
    good, bad = read(path)
    assert bad == []
    assert [(d.id, d.title, d.text) for d in good] == [
        ("a.csv/w", "Wells", 'Salt, and "more".\nSecond line\n\nyear: 1901'),
        ("a.csv/b", "", "Bridge\n\nyear: 1950"),
    ]
    assert good[0].metadata == {"year": 1901}
    assert good[0].file == str(path)


def test_tables_of_one_folder_may_number_their_rows_alike(tmp_path, read):
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text(f"id,text\n1,One of {name}\n2,Two of {name}\n")
    good, bad = read(tmp_path)
    assert bad == []
    assert [d.id for d in good] == ["a.csv/1", "a.csv/2", "b.csv/1", "b.csv/2"]


def test_rows_without_id_are_named_by_the_line_they_begin_on(tmp_path, read):
    (tmp_path / "a.csv").write_text('text\n"two\nlines"\nx\n')
    assert [d.id for d in read(tmp_path)[0]] == ["a.csv:2", "a.csv:4"]


@pytest.mark.parametrize(
    ("name", "content"), [("a.tsv", "text\tn\none, two\t1\n"), ("a.csv", 'text;n\n"one, two";1\n')]
)
def test_tabs_and_semicolons(tmp_path, read, name, content):
    (tmp_path / name).write_text(content)
    document = read(tmp_path)[0][0]
    assert (document.text, document.metadata) == ("one, two\n\nn: 1", {"n": 1})


def test_bad_rows_cost_only_themselves(tmp_path, read):
    path = tmp_path / "a.csv"
    rows = [b"text,n", b"good,1", b"short", b"caf\xe9,2", b'"x"y,3', b" ,4", b"nul \0,5", b"last,6"]
    path.write_bytes(b"\n".join(rows))
    good, bad = read(path)
    assert [d.text for d in good] == ["good\n\nn: 1", "café\n\nn: 2", "n: 4", "last\n\nn: 6"]
    assert [b.source for b in bad] == [f"{path}:{n}" for n in (3, 5, 7)]
    for found, reason in zip(bad, ["1 cells; expected 2", "not a row", "NUL"], strict=True):
        assert reason in found.reason


def test_a_cell_may_be_long(tmp_path, read):
    (tmp_path / "a.csv").write_text(f"text\ngood\n{'x' * 200_000}\nlost\n")
    good, bad = read(tmp_path)
    assert [len(d.text) for d in good] == [4, 200_000, 4]
    assert bad == []


@pytest.mark.parametrize("rest", ['"open\n' + "more\n" * 9, f"{'x' * 60}\n", "a,b,c,d,e,f,g\n"])
def test_row_beyond_the_limit_ends_the_table_and_says_so(tmp_path, read, monkeypatch, rest):
    monkeypatch.setattr(delimited, "MAX_LINE_BYTES", 40)
    monkeypatch.setattr(delimited, "MAX_CELLS", 5)
    path = tmp_path / "a.csv"
    path.write_text(f"text\ngood\n{rest}lost\n")
    good, bad = read(tmp_path)
    assert [d.text for d in good] == ["good"]
    assert [b.source for b in bad] == [f"{path}:3", str(path)]
    assert "close its quotation mark" in bad[0].reason
    assert "the rest of the file is left out" in bad[1].reason


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_json_of_too_many_values_is_refused(tmp_path, read, monkeypatch, name):
    (tmp_path / name).write_text('{"text": "a", "x": [[], {}, []]}\n')
    monkeypatch.setattr(files, "MAX_VALUES", 5)
    assert len(read(tmp_path)[0]) == 1
    monkeypatch.setattr(files, "MAX_VALUES", 4)
    good, bad = read(tmp_path)
    assert good == [] and "objects and lists; split it" in bad[0].reason


def test_line_beyond_the_limit_costs_only_itself(tmp_path, read, monkeypatch):
    monkeypatch.setattr(records, "MAX_LINE_BYTES", 40)
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "one"}}\n{{"text": "{"x" * 100}"}}\n{{"text": "two"}}\n')
    good, bad = read(path)
    assert [(d.id, d.text) for d in good] == [("a.jsonl:1", "one"), ("a.jsonl:3", "two")]
    assert [b.source for b in bad] == [f"{path}:2"]


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.csv", "a.jsonl", "a.json", "a.html"])
def test_encoding_can_be_named(tmp_path, read, name):
    wrap = {"a.csv": "text\n{}\n", "a.jsonl": '{{"text": "{}"}}\n', "a.json": '{{"text": "{}"}}'}
    content = wrap.get(name, "{}").format("盐井靠人力开采")
    (tmp_path / name).write_bytes(content.encode("gb18030"))
    assert read(tmp_path)[0] == []
    assert read(tmp_path, encoding="gb18030")[0][0].text == "盐井靠人力开采"


def test_byte_order_mark_is_stronger_than_the_named_encoding(tmp_path, read):
    for name, wrap in (("a.txt", "{}"), ("a.csv", "text\n{}\n")):
        (tmp_path / name).write_bytes(wrap.format("盐井").encode("utf-16"))
    good, bad = read(tmp_path, encoding="gb18030")
    assert bad == []
    assert [d.text for d in good] == ["盐井", "盐井"]


@pytest.mark.parametrize("look", range(1, 7))
@pytest.mark.parametrize(
    ("before", "after"), [(b"1234", b"n.a."), (b"true", b"neve"), (b"size", b"mass")]
)
def test_a_table_that_changes_between_two_looks_costs_a_line(before, after, look):
    class Changing(io.BytesIO):
        looks = 0

        def seek(self, place, whence=0):
            self.looks += place == 0
            if self.looks == look:
                buffer = self.getbuffer()
                at = bytes(buffer).find(before)
                if at >= 0:
                    buffer[at : at + 4] = after
            return super().seek(place, whence)

    stream = Changing(b"text,size,kind\nherons,1234,true\n")
    (found,) = read_table(stream, File(Path("birds.csv"), "birds.csv", ReadOptions()))
    if look == 6:  # behind the look that found the columns' types
        assert isinstance(found, BadDocument)
        assert found.source == "birds.csv:2"
        assert "changed while the file was read" in found.reason
    else:
        assert isinstance(found, Document)
        assert after.decode() in found.text
    assert stream.looks >= 6
