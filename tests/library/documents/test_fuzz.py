"""Whatever the bytes and names: documents or reports, and no exception but a JaxragError."""

import io
import json
import os
import zipfile
from pathlib import Path

import openpyxl
import pptx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxrag.base.errors import JaxragError
from jaxrag.library.documents import BadDocument, Document, Intake, Shard, read_paths
from jaxrag.library.documents.chunking import Chunking, split
from jaxrag.library.documents.readers import READERS

FUZZ = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SAMPLES = Path(__file__).parent / "samples"
VALID = {
    ".txt": "The wells. 盐井。\n".encode(),
    ".md": b"# Wells\n\n```\ncode\n```\n\ntext",
    ".jsonl": b'{"text": "one", "id": "a", "n": [1, {"x": null}]}\n{"text": "two"}\n',
    ".json": b'{"documents": [{"text": "one", "id": 3}, {"text": "two", "title": "T"}]}',
    ".csv": b'id,text,year\na,"one, ""two""",1901\nb,three,\n',
    ".tsv": b"text\tyear\none\t1901\n",
    **{f".{kind}": (SAMPLES / f"wells.{kind}").read_bytes() for kind in ("html", "rst", "org")},
    ".htm": b'<?xml version="1.0" encoding="utf-8"?><html><p>&#55296;&amp;x</p></html>',
}
BOOK = {
    "META-INF/container.xml": '<container><rootfile full-path="o.opf"/></container>',
    "o.opf": '<package><title>t</title><item id="a" href="a.xhtml"/><itemref idref="a"/></package>',
    "a.xhtml": '<html xmlns="http://www.w3.org/1999/xhtml"><body><h1>a</h1>&nbsp;b</body></html>',
}
SPLICES = st.sampled_from(
    [b"", b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b'"', b"\r\n", b"\n", b"[" * 50, b"{", b"\\ud800",
     b"NaN", b"1e999", b"9" * 5000, b"<div>" * 300, b"<!--", b"]]>", b"&#0;", b"charset=utf-7",
     b"\x1a", b",,,"]
)  # fmt: skip


def mutations(data):
    """Bytes of a valid file with pieces cut out, repeated and replaced."""
    place = st.integers(0, len(data))
    edit = st.tuples(place, place, st.one_of(SPLICES, st.binary(max_size=8)))

    def apply(edits):
        out = data
        for a, b, piece in edits:
            a, b = sorted((min(a, len(out)), min(b, len(out), a + 40)))
            out = out[:a] + piece + out[b:]
        return out

    return st.lists(edit, min_size=1, max_size=4).map(apply)


def check(found):
    """Documents that could be stored and reports of one printable line."""
    for item in found:
        if isinstance(item, BadDocument):
            assert item.source.isprintable()
            assert item.reason.isprintable() and item.reason
        else:
            assert isinstance(item, Document)
            json.dumps([item.id, item.text, item.title, item.file, item.metadata]).encode()
            item.text.encode()
            assert list(item.pages) == sorted(item.pages)


@pytest.mark.parametrize("suffix", VALID)
@FUZZ
@given(data=st.data())
def test_damaged_text_files(tmp_path, read_here, suffix, data):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(data.draw(st.one_of(mutations(VALID[suffix]), st.binary(max_size=200))))
    encoding = data.draw(
        st.sampled_from([None, None, "gb18030", "utf-16", "cp1252", "utf-7", "cp037"])
    )
    check(read_here([path], encoding=encoding))


@pytest.fixture(scope="module")
def binaries(make_pdf, make_docx):
    def fill(document):
        document.add_heading("Wells", 1)
        document.add_paragraph("Salt 盐井", style="List Bullet")
        document.add_table(rows=1, cols=2).cell(0, 0).text = "cell"

    presentation = pptx.Presentation()
    slide = presentation.slides.add_slide(presentation.slide_layouts[1])
    slide.shapes.title.text, slide.placeholders[1].text = "Wells", "Salt\n盐井"
    book = openpyxl.Workbook()
    book.active.append(["name", "depth"])
    book.active.append(["盐井", 7.5])
    made = {".pptx": io.BytesIO(), ".xlsx": io.BytesIO(), ".epub": io.BytesIO()}
    presentation.save(made[".pptx"])
    book.save(made[".xlsx"])
    with zipfile.ZipFile(made[".epub"], "w", zipfile.ZIP_DEFLATED) as archive:
        for name, part in BOOK.items():
            archive.writestr(name, part)
    return {
        ".pdf": make_pdf(["one\ntwo", "盐井"], title="T"),
        ".docx": make_docx(fill),
        **{suffix: out.getvalue() for suffix, out in made.items()},
    }


@pytest.mark.parametrize("suffix", [".pdf", ".docx", ".pptx", ".xlsx", ".epub"])
@FUZZ
@given(data=st.data())
def test_damaged_binary_files(tmp_path, read_here, binaries, suffix, data):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(data.draw(st.one_of(mutations(binaries[suffix]), st.binary(max_size=200))))
    check(read_here([path]))


@pytest.mark.parametrize("suffix", [".docx", ".pptx", ".xlsx", ".epub"])
@FUZZ
@given(data=st.data())
def test_damaged_parts_of_an_archive(tmp_path, read_here, binaries, suffix, data):
    """Damage inside the archive, behind intact checksums."""
    with zipfile.ZipFile(io.BytesIO(binaries[suffix])) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    name = data.draw(st.sampled_from(sorted(name for name in parts if len(parts[name]) < 20_000)))
    parts[name] = data.draw(mutations(parts[name]))
    if data.draw(st.booleans()):
        del parts[data.draw(st.sampled_from(sorted(parts)))]
    path = tmp_path / f"a{suffix}"
    with zipfile.ZipFile(path, "w") as archive:
        for part, content in parts.items():
            archive.writestr(part, content)
    check(read_here([path]))


NAMES = st.one_of(
    st.binary(min_size=1, max_size=20).filter(lambda name: not {0, 47} & set(name)),
    st.text(min_size=1, max_size=80).map(lambda name: name.encode("utf-8", "replace")).filter(
        lambda name: not {0, 47} & set(name) and len(name) < 200
    ),
)  # fmt: skip


FILES = st.tuples(NAMES, st.sampled_from(list(READERS)), st.binary(max_size=20))


@FUZZ
@given(st.lists(FILES, max_size=4), st.integers(0, 1))
def test_file_names_of_any_bytes(tmp_path_factory, read_here, files, shard):
    folder = os.fsencode(tmp_path_factory.mktemp("names"))
    for name, suffix, content in files:
        with open(os.path.join(folder, name + suffix.encode()), "wb") as file:
            file.write(content)
    part = Shard(shard, 2)
    found = list(read_here([os.fsdecode(folder)], wanted=part.holds))
    check(found)
    check(Intake(found, part))


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=10)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)  # fmt: skip


@FUZZ
@given(
    st.lists(
        st.one_of(
            st.dictionaries(st.sampled_from(["text", "id", "title", "x", "\ud800"]), JSON),
            st.text(max_size=20),
        ),
        max_size=4,
    )
)
def test_mappings_and_texts_of_any_values(items):
    check(Intake(items, Shard()))


class Bytes:
    """A tokenizer of one token a byte, with its character's offsets."""

    def encode_with_offsets(self, text):
        import numpy as np

        offsets = [(i, i + 1) for i, c in enumerate(text) for _ in c.encode()]
        return np.zeros(len(offsets), np.int32), np.array(offsets, np.int32).reshape(-1, 2)


@FUZZ
@given(mutations(VALID[".md"]), st.sampled_from(["tokens", "sentence", "markdown"]))
def test_whatever_is_read_can_be_cut(tmp_path, data, by):
    path = tmp_path / "a.md"
    path.write_bytes(data)
    for item in read_paths([path]):
        if isinstance(item, Document):
            try:
                chunks = split(item.text, Bytes(), Chunking(8, 2, by), item.pages)
            except JaxragError:
                continue
            assert chunks[0].start == 0
            assert chunks[-1].end == len(item.text)
