"""Files made to cost more than they hold: time, memory, or what lies outside of their folder."""

import io
import os
import tracemalloc
import zipfile

import pytest
from refusal import refused

from jaxrag.base.errors import DocumentError
from jaxrag.library.documents import files as files_module
from jaxrag.library.documents.text import first_heading


@pytest.fixture
def linked(tmp_path):
    """A folder with links inside of it, out of it to a file and to a folder, and in a loop."""
    outside = tmp_path / "outside"
    inside = tmp_path / "inside"
    (outside / "deep").mkdir(parents=True)
    inside.mkdir()
    (outside / "secret.txt").write_text("secret")
    (outside / "deep" / "more.txt").write_text("more")
    (inside / "a.txt").write_text("a")
    (inside / "same.txt").symlink_to("a.txt")
    (inside / "stolen.txt").symlink_to(outside / "secret.txt")
    (inside / "twice.txt").symlink_to("stolen.txt")
    (inside / "folder").symlink_to(outside / "deep")
    (inside / "loop").symlink_to(inside)
    return inside


def edited(data, **parts):
    """A .docx with parts replaced by ``change(bytes)`` or, where there are none, added."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", 8) as new:
        for name in old.namelist():
            change = parts.get(name.replace("/", "_").removesuffix(".xml"), lambda part: part)
            new.writestr(name, change(old.read(name)))
    return out.getvalue()


@pytest.mark.parametrize("tail", [" x", "", " #"], ids=["text", "end", "mark"])
def test_a_heading_of_a_million_marks_is_read_at_once(tail):
    # Trying every place where the title might end takes the square of this: most of an hour.
    marks = " #" * 500_000
    title = first_heading("intro\n# a" + marks + tail + "\n# b\n")
    assert title == ("a" + marks + tail if tail == " x" else "a")
    assert first_heading("# \n#  ##\n" * 200_000 + "# b") == "b"


def test_docx_that_lies_about_its_sizes_is_unpacked_no_further(tmp_path, read, make_docx):
    size = 48 << 20
    data = edited(make_docx(lambda d: None), word_document=lambda part: part + b" " * size)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        true = archive.getinfo("word/document.xml").file_size
    said = data.replace(true.to_bytes(4, "little"), (1000).to_bytes(4, "little"))
    assert said.count((1000).to_bytes(4, "little")) == 2  # beside the part and in the directory
    (tmp_path / "a.docx").write_bytes(said)
    tracemalloc.start()
    assert "Bad CRC-32" in read.refused(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < size // 4
    tracemalloc.stop()


def test_docx_parts_that_are_not_text_are_never_unpacked(tmp_path, read, make_docx):
    bomb = io.BytesIO(make_docx(lambda document: document.add_paragraph("text")))
    with zipfile.ZipFile(bomb, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/media/image1.png", bytes(48 << 20))
    (tmp_path / "a.docx").write_bytes(bomb.getvalue())
    tracemalloc.start()
    assert read.only(tmp_path).text == "text"
    assert tracemalloc.get_traced_memory()[1] < 12 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("count", [3, 4])
def test_all_parts_of_an_archive_share_one_bound(monkeypatch, count):
    monkeypatch.setattr(files_module, "MAX_UNPACKED_BYTES", 300)
    data = files_module.repacked((f"{n}.xml", b"<a/>".ljust(100)) for n in range(count))
    if count == 3:
        assert len(list(files_module.parts(data, "DOCX"))) == 3
        return
    with refused(DocumentError):
        list(files_module.parts(data, "DOCX"))


def test_docx_packed_as_none_is(tmp_path, read, make_docx):
    out = io.BytesIO()
    old = zipfile.ZipFile(io.BytesIO(make_docx(lambda d: None)))
    with old, zipfile.ZipFile(out, "w", zipfile.ZIP_BZIP2) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    (tmp_path / "a.docx").write_bytes(out.getvalue())
    assert "packed in a way" in read.refused(tmp_path)


def test_docx_of_many_paragraphs_and_styles(tmp_path, read, make_docx):
    many = 4000
    styles = "".join(
        f'<w:style w:type="paragraph" w:styleId="S{i}"><w:name w:val="heading 2"/></w:style>'
        for i in range(many)
    )
    body = "".join(
        f'<w:p><w:pPr><w:pStyle w:val="S{i}"/></w:pPr><w:r><w:t>t{i}</w:t></w:r></w:p>'
        for i in range(many)
    )
    data = edited(
        make_docx(lambda document: None),
        word_document=lambda part: part.replace(b"<w:body>", b"<w:body>" + body.encode()),
        word_styles=lambda part: part.replace(b"</w:styles>", styles.encode() + b"</w:styles>"),
    )
    (tmp_path / "a.docx").write_bytes(data)
    assert read.only(tmp_path).text == "\n\n".join(f"## t{i}" for i in range(many))


def test_docx_paragraphs_of_no_style_or_an_unknown_one_have_the_default(tmp_path, read, make_docx):
    def fill(document):
        document.add_paragraph("a")
        document.add_paragraph("b")._p.get_or_add_pPr().get_or_add_pStyle().val = "Nowhere"
        document.styles["Heading 3"].element.set(
            "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}default", "1"
        )

    (tmp_path / "a.docx").write_bytes(make_docx(fill))
    assert read.only(tmp_path).text == "### a\n\n### b"


def test_docx_tables_in_tables_are_cells_on_one_line(tmp_path, read, make_docx):
    def fill(document):
        cell = document.add_table(rows=1, cols=2).cell(0, 0)
        cell.text = "a\nb"
        inner = cell.add_table(rows=1, cols=3)
        inner.cell(0, 0).text, inner.cell(0, 2).text = " c ", "d  e"

    (tmp_path / "a.docx").write_bytes(make_docx(fill))
    assert read.only(tmp_path).text == "a b c | d e"


@pytest.mark.parametrize("name", ["a.html", "a.docx"])
def test_markup_of_too_many_tags_is_refused(tmp_path, read, make_docx, monkeypatch, name):
    many = 3000
    if name == "a.html":
        data = b"<p>a" * many
    else:
        data = make_docx(lambda document: [document.add_paragraph() for _ in range(many)])
    (tmp_path / name).write_bytes(data)
    read(tmp_path)
    monkeypatch.setattr(files_module, "MAX_TAGS", many - 1)
    assert "tags; split the file" in read.refused(tmp_path)


def names(bad):
    return [os.path.basename(one.source) for one in bad]


def test_links_that_leave_their_folder_are_reported(linked, read):
    good, bad = read(linked)
    assert [document.id for document in good] == ["a.txt", "same.txt"]
    assert names(bad) == ["folder", "loop", "stolen.txt", "twice.txt"]
    assert "--follow-links" in bad[-1].reason


def test_links_are_followed_on_demand_each_folder_once(linked, read):
    good, bad = read(linked, follow_links=True)
    assert {document.id: document.text for document in good} == {
        "a.txt": "a",
        "folder/more.txt": "more",
        "same.txt": "a",
        "stolen.txt": "secret",
        "twice.txt": "secret",
    }
    assert names(bad) == ["loop"]


def test_a_named_link_is_followed(linked, read):
    good, bad = read(linked / "stolen.txt", linked / "folder")
    assert [document.text for document in good] == ["secret", "more"]
    assert bad == []
