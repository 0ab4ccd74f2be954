"""Readers of .epub, .rst and .org, on files written by hand, broken and hostile ones."""

import io
import zipfile

import pytest

from jaxrag.library.documents import files as files_module

CONTAINER = """<?xml version="1.0"?>
<container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>
<rootfile full-path="OEBPS/book.opf" media-type="application/oebps-package+xml"/>
</rootfiles></container>"""
PACKAGE = """<?xml version="1.0"?>
<package xmlns="http://www.idpf.org/2007/opf" version="3.0">
<metadata xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>Salt
 wells</dc:title><dc:creator>Bo</dc:creator><dc:creator>Ka</dc:creator>
<dc:language>en</dc:language><dc:date>2021-03-04</dc:date></metadata>
<manifest><item id="n" href="nav.xhtml" properties="nav"/><item id="a" href="text/one%20a.xhtml"/>
<item id="b" href="two.html#part"/><item id="p" href="cover.png"/></manifest>
<spine><itemref idref="n"/><itemref idref="p"/><itemref idref="b"/><itemref idref="a"/>
<itemref idref="b"/><itemref idref="gone"/></spine></package>"""
ONE = """<?xml version="1.0" encoding="utf-8"?><!DOCTYPE html PUBLIC "-//W3C//DTD XHTML 1.1//EN" "">
<html xmlns="http://www.w3.org/1999/xhtml"><head><title/></head><body><a id="x"/>
<h1>盐井</h1><p>Salt&nbsp;&amp;&mdash;water<script/></p>
<table><tr><td>Name</td><td>Depth</td></tr></table></body></html>"""
TWO = "<html><body><h1>First</h1><p>Not <b>well-formed<br> XML</body></html>"


def book(**parts):
    """Bytes of a book; parts by the last of their name, without its dot: ``container=...``."""
    made = {"META-INF/container.xml": CONTAINER, "OEBPS/book.opf": PACKAGE,
            "OEBPS/nav.xhtml": "<nav>contents</nav>", "OEBPS/text/one a.xhtml": ONE,
            "OEBPS/two.html": TWO, "OEBPS/cover.png": "no text"}  # fmt: skip
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", 8) as archive:
        archive.writestr("mimetype", "application/epub+zip")
        for name, part in made.items():
            key = name.rpartition("/")[2].partition(".")[0].replace(" ", "_")
            if parts.get(key, part) is not None:
                archive.writestr(name, parts.get(key, part))
        if "encryption" in parts:
            archive.writestr("META-INF/encryption.xml", parts["encryption"])
    return out.getvalue()


def test_a_book_is_its_chapters_in_the_order_they_are_read_in(tmp_path, read):
    (tmp_path / "a.epub").write_bytes(book())
    document = read.only(tmp_path)
    assert document.text == (
        "# First\n\nNot well-formed\nXML\n\n# 盐井\n\nSalt &—water\n\nName | Depth"
    )
    assert document.title == "Salt wells"
    assert document.metadata == {"author": "Bo, Ka", "lang": "en", "date": "2021-03-04"}


def test_a_chapter_that_cannot_be_read_costs_only_itself(tmp_path, read):
    (tmp_path / "a.epub").write_bytes(book(two=b"<p>\xff\xff\xff</p>"))
    good, [bad] = read(tmp_path)
    assert good[0].text.startswith("# 盐井")
    assert bad.source.endswith("a.epub, OEBPS/two.html")
    assert "the chapter cannot be read (byte 3 is not UTF-8" in bad.reason


def locked(name):
    return f'<encryption><CipherReference URI="{name}"/></encryption>'


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "cannot be parsed as EPUB"),
        (book()[:300], "cannot be parsed as EPUB"),
        (book(container=None), "META-INF/container.xml is not in it"),
        (book(container="<container/>"), "names no package"),
        (book(container="<container>"), "cannot be parsed as EPUB (XMLSyntaxError"),
        (book(book=None), "OEBPS/book.opf is not in it"),
        (book(book="<package/>"), "holds no chapter with text"),
        (book(encryption=locked("OEBPS/text/one%20a.xhtml")), "is encrypted"),
        (book(container=CONTAINER.replace("OEBPS/book.opf", "../../etc/passwd")), "is not in it"),
    ],
)  # fmt: skip
def test_books_that_cannot_be_read(tmp_path, read, data, reason):
    (tmp_path / "a.epub").write_bytes(data)
    assert reason in read.refused(tmp_path)


def test_fonts_that_are_encrypted_lock_no_book(tmp_path, read):
    (tmp_path / "a.epub").write_bytes(book(encryption=locked("OEBPS/font.otf")))
    assert read.only(tmp_path).title == "Salt wells"


def entities(secret):
    """A document type of an entity that grows, and of one that is a file."""
    laughs = "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 12))
    return f'<!DOCTYPE d [<!ENTITY a0 "haha">{laughs}<!ENTITY x SYSTEM "{secret.as_uri()}">]>'


@pytest.mark.parametrize("used", ["&x;", "&a11;"], ids=["outside", "growing"])
def test_entities_of_a_book_neither_grow_nor_lead_outside(tmp_path, read, used):
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    kind = entities(secret)
    chapter = f"{kind}<html><body><p>Salt {used} water</p></body></html>"
    (tmp_path / "a.epub").write_bytes(book(one_a=chapter))
    assert read.only(tmp_path / "a.epub").text.endswith(f"Salt {used} water")
    package = PACKAGE.replace('<?xml version="1.0"?>', kind).replace("Salt", used)
    (tmp_path / "a.epub").write_bytes(book(book=package))
    good, bad = read(tmp_path / "a.epub")
    assert [document.title for document in good] == (["&x; wells"] if used == "&x;" else [])
    assert all("cannot be parsed as EPUB (XMLSyntaxError" in it.reason for it in bad)


def test_a_book_that_unpacks_to_too_much_is_refused(tmp_path, read, monkeypatch):
    monkeypatch.setattr(files_module, "MAX_PART_BYTES", 2_000_000)
    (tmp_path / "a.epub").write_bytes(book(two="<p>" + " " * 3_000_000))
    assert "OEBPS/two.html unpacks to more than" in read.refused(tmp_path)


def test_pictures_of_a_book_are_not_unpacked(tmp_path, read, monkeypatch):
    monkeypatch.setattr(files_module, "MAX_PART_BYTES", 100_000)
    (tmp_path / "a.epub").write_bytes(book(cover=bytes(1_000_000)))
    assert read.only(tmp_path).title == "Salt wells"


# reStructuredText


def test_nothing_of_other_files_comes_into_restructuredtext(tmp_path, read):
    secret = tmp_path / "secret"
    secret.write_text("a,hidden")
    text = (
        f"Wells\n\n.. include:: {secret}\n\n.. raw:: html\n\n   <b>raw</b>\n\n"
        f".. raw:: html\n   :file: {secret}\n\n.. literalinclude:: {secret}\n\n"
        f".. csv-table:: T\n   :file: {secret}\n\n.. image:: {secret}\n   :loading: embed\n\n"
        ".. role:: html(raw)\n   :format: html\n\nA :html:`<i>` b\n"
    )
    (tmp_path / "a.rst").write_text(text)
    document = read.only(tmp_path / "a.rst")
    assert "hidden" not in document.text
    assert "raw</b>" not in document.text
    assert document.text.startswith("Wells\n\n")


def test_what_docutils_refuses_stays_as_it_was_written(tmp_path, read):
    table = ".. csv-table:: T\n   :widths: x\n\n   a, b\n\n"
    (tmp_path / "a.rst").write_text(f"Wells\n\n{table}end_ `x\n")
    text = read.only(tmp_path).text
    assert ".. csv-table:: T" in text
    assert "a, b" in text
    assert text.endswith("end_ `x")


def test_restructuredtext_beyond_the_bound_or_without_text(tmp_path, read, monkeypatch):
    monkeypatch.setattr(files_module, "MAX_TEXT_CHARACTERS", 1_000)
    (tmp_path / "a.rst").write_text(".. |a| replace:: " + "x" * 200 + "\n\n" + "|a| " * 10)
    assert "Mi characters; split it" in read.refused(tmp_path)
    (tmp_path / "a.rst").write_text(".. comment\n")
    assert "holds no text" in read.refused(tmp_path)


def test_restructuredtext_in_itself_without_end(tmp_path, read):
    (tmp_path / "a.rst").write_text("".join("  " * n + "- x\n\n" for n in range(400)))
    assert "cannot be parsed as reStructuredText (RecursionError" in read.refused(tmp_path)


# Org


def test_lines_of_org_that_look_like_tables_are_read_at_once(tmp_path, read):
    # Trying every way to part it into cells would take longer than anybody waits.
    (tmp_path / "a.org").write_text("| " + "word " * 5_000)
    assert len(read.only(tmp_path).text) == 5 * 5_000 - 1


def test_each_chunk_of_a_long_table_names_its_columns(tmp_path, read):
    rows = "".join(f"<tr><td>Boat {n}<td>{n} m" for n in range(200))
    page = f"<table><thead><tr><th>Name<th>Length</thead>{rows}</table>"
    (tmp_path / "boats.html").write_text(page, encoding="utf-8")
    first, *others = read.only(tmp_path / "boats.html").text.splitlines()
    assert first == "Name | Length"
    assert others == [f"Name: Boat {n} | Length: {n} m" for n in range(200)]
