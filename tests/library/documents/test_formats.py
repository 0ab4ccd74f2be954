"""Readers of .html, .pdf and .docx on real files, in English and Chinese."""

from pathlib import Path

import pytest

from jaxrag.library.documents import files as files_module
from jaxrag.library.documents import pdf as pdf_module
from jaxrag.library.documents.html import html_text
from jaxrag.library.documents.left_out import LeftOut

SAMPLES = Path(__file__).parent / "samples"  # each with the text that it becomes


@pytest.mark.parametrize(
    ("name", "title"),
    [("wells.html", "The Wells"), ("wells.rst", "Salt wells"), ("wells.org", "Salt wells")],
)
def test_a_sample_becomes_its_main_text(read, name, title):
    document = read.only(SAMPLES / name)
    assert document.text == (SAMPLES / f"{name}.txt").read_text(encoding="utf-8").rstrip("\n")
    assert (document.id, document.title) == (name, title)
    assert document.file == str(SAMPLES / name)


# HTML


def page_text(page):
    return html_text(page, LeftOut())[1]


def test_what_stands_around_main_or_the_single_article_is_left_out():
    side = "<div>side</div>"
    assert page_text(f"{side}<main><p>text</p></main>{side}") == "text"
    assert page_text(f"{side}<article><p>text</p></article>") == "side\n\ntext"
    assert page_text(f"{side}<article><p>a longer text</p></article>") == "a longer text"
    assert page_text(f"{side}<main></main>") == "side"
    both = "<article>one</article><article>two</article>"
    assert page_text(side + both) == "side\n\none\n\ntwo"


def test_table_of_layout_keeps_its_paragraphs():
    page = "<table><tr><td>menu</td><td><p>one</p><p>two</p>three<br>four</td></tr></table>"
    assert page_text(page) == "menu\n\none\n\ntwo\n\nthree\nfour"
    assert page_text("<table><tr><td><img></td><td>text</td></tr></table>") == "text"


@pytest.mark.parametrize(
    ("declared", "encoding"),
    [
        ('<meta charset="gb2312">', "gb18030"),
        ('<meta http-equiv="Content-Type" content="text/html; charset=big5">', "big5"),
        ("<?xml version='1.0' encoding='Shift_JIS'?>", "cp932"),
        ("", "utf-8"),
        ("", "utf-16"),
        ('<meta charset="utf-8">', "utf-16"),
    ],
)
def test_the_encoding_is_what_the_page_says(tmp_path, read, declared, encoding):
    page = f"{declared}<html><body><p>日本和香港</p></body></html>"
    (tmp_path / "a.html").write_bytes(page.encode(encoding))
    assert read.only(tmp_path).text == "日本和香港"


def test_browsers_reading_of_latin_1(tmp_path, read):
    (tmp_path / "a.htm").write_bytes(b'<meta charset="iso-8859-1"><p>\x93caf\xe9\x94</p>')
    assert read.only(tmp_path).text == "“café”"


# PDF


def test_pdf_keeps_its_pages(tmp_path, read, make_pdf):
    pages = ["The salt wells\nare worked by hand.", "", "盐井靠人力开采。", "Last page."]
    (tmp_path / "wells.pdf").write_bytes(make_pdf(pages, title="On wells"))
    document = read.only(tmp_path)
    assert document.text == "\n\n".join(page for page in pages if page)
    assert document.title == "On wells"
    first, empty, third, last = document.pages
    assert first == 0
    assert document.text[third:].startswith("盐井")
    assert document.text[last:] == "Last page."
    assert empty == third, "a page without text begins where the next one does"


def test_pdf_whose_lines_run_from_the_right(tmp_path, read, make_pdf):
    (tmp_path / "a.pdf").write_bytes(make_pdf(["םלוע םולש"]))  # as it is drawn, from the left
    assert read.only(tmp_path).text == "שלום עולם"


@pytest.mark.parametrize("title", ["", "untitled", "Untitled"])  # as some programs write for none
def test_pdf_without_title_takes_the_name(tmp_path, read, make_pdf, title):
    (tmp_path / "wells.pdf").write_bytes(make_pdf(["text"], title=title))
    assert read.only(tmp_path).title == "wells"


def test_pdf_that_needs_a_password_or_recognition(tmp_path, read, make_pdf):
    (tmp_path / "a.pdf").write_bytes(make_pdf(["text"], encrypt=True))
    assert "is encrypted; save a copy" in read.refused(tmp_path / "a.pdf")
    (tmp_path / "b.pdf").write_bytes(make_pdf(["", ""]))
    assert "no text layer on any page; run text recognition" in read.refused(tmp_path / "b.pdf")


def test_bad_page_costs_only_itself(tmp_path, read, make_pdf, monkeypatch):
    read_page = pdf_module._page

    def breaking(pdf, number, file):
        if number == 1:
            raise KeyError("/Font\nmissing")
        return read_page(pdf, number, file)

    monkeypatch.setattr(pdf_module, "_page", breaking)
    path = tmp_path / "a.pdf"
    path.write_bytes(make_pdf(["one", "two", "three"]))
    good, bad = read(path)
    assert good[0].text == "one\n\nthree"
    assert good[0].pages == (0, 5, 5)
    assert [(b.source, b.reason.count("\n")) for b in bad] == [(f"{path}, page 2", 0)]


def test_pdf_text_beyond_the_bound_is_refused(tmp_path, read, make_pdf, monkeypatch):
    monkeypatch.setattr(files_module, "MAX_TEXT_CHARACTERS", 100)
    (tmp_path / "a.pdf").write_bytes(make_pdf(["x" * 60, "y" * 60]))
    assert "split it" in read.refused(tmp_path)


def test_halves_of_surrogates_and_nuls_of_broken_fonts_do_not_cost_the_file():
    assert pdf_module._clean("a\0b \ud83c\udf75 \ud800") == "ab 🍵 \ufffd"


def test_chinese_lines_that_fill_the_page_go_on_with_the_next(tmp_path, read, make_pdf):
    page = "标题\n盐井靠人力开采，已有千\n年历史。\n第二段。\nThe end of\nthe page."
    (tmp_path / "a.pdf").write_bytes(make_pdf([page]))
    assert read.only(tmp_path).text == page.replace("千\n年", "千年")


# DOCX


def fill_wells(document):
    document.core_properties.title = ""
    document.add_heading("盐井 Wells", 0)
    document.add_paragraph("The salt wells\tare worked by hand.")
    document.add_heading("Depths", 2)
    document.add_paragraph("first", style="List Bullet")
    document.add_paragraph("second", style="List Number")
    table = document.add_table(rows=2, cols=2)
    for place, text in enumerate(["Name", "Depth", "A", "12 m"]):
        table.cell(place // 2, place % 2).text = text
    inner = table.cell(1, 0).add_table(rows=1, cols=2)
    inner.cell(0, 0).text, inner.cell(0, 1).text = "x", "y"
    document.add_paragraph("盐井靠人力开采。")


def test_docx_in_document_order(tmp_path, read, make_docx):
    (tmp_path / "wells.docx").write_bytes(make_docx(fill_wells))
    document = read.only(tmp_path)
    assert document.title == "盐井 Wells"
    assert document.text == (
        "# 盐井 Wells\n\nThe salt wells are worked by hand.\n\n## Depths\n\n- first\n1. second\n\n"
        "Name | Depth\nName: A x | y | Depth: 12 m\n\n盐井靠人力开采。"
    )


def test_docx_insertions_and_content_controls_are_text_deletions_are_not(tmp_path, read, make_docx):
    from docx.oxml import parse_xml
    from docx.oxml.ns import nsdecls

    def fill(document):
        body = document.element.body
        w = nsdecls("w")
        body.insert(0, parse_xml(
            f"<w:sdt {w}><w:sdtContent><w:p><w:r><w:t>control</w:t></w:r></w:p></w:sdtContent>"
            "</w:sdt>"
        ))  # fmt: skip
        body.insert(1, parse_xml(
            f"<w:p {w}><w:ins><w:r><w:t>inserted</w:t></w:r></w:ins>"
            "<w:del><w:r><w:delText>deleted</w:delText></w:r></w:del>"
            '<w:hyperlink><w:r><w:t xml:space="preserve"> link</w:t></w:r></w:hyperlink></w:p>'
        ))  # fmt: skip

    (tmp_path / "a.docx").write_bytes(make_docx(fill))
    assert read.only(tmp_path).text == "control\n\ninserted link"
