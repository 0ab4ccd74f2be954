"""Readers of .xlsx and .pptx, on files that their libraries wrote, and on hostile ones."""

import datetime
import io
import re
import zipfile

import openpyxl
import pptx
import pytest
from pptx.util import Inches

from jaxrag.library.documents import files as files_module

LAUGHS = '<!DOCTYPE d [<!ENTITY a0 "ha">' + "".join(
    f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 12)
) + "]>"  # fmt: skip

OUTSIDE = '<!DOCTYPE d [<!ENTITY x SYSTEM "{}">]>'


def workbook(*sheets, title=None):
    """Bytes of a workbook; a sheet is its name and its rows."""
    book = openpyxl.Workbook()
    book.remove(book.active)
    book.properties.title = title
    for name, rows in sheets:
        sheet = book.create_sheet(name)
        for row in rows:
            sheet.append(row)
    return saved(book)


def saved(made):
    out = io.BytesIO()
    made.save(out)
    return out.getvalue()


def edited(data, **changes):
    """An archive with parts changed whose names end so: ``sheet1=lambda part: ...``."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", 8) as new:
        for name in old.namelist():
            part = old.read(name)
            for key, change in changes.items():
                if name.endswith(f"{key}.xml"):
                    part = change(part)
            new.writestr(name, part)
    return out.getvalue()


WELLS = ("Wells", [["Name", "Depth", "Dug"], ["Yánjing", 12, datetime.date(1901, 3, 4)],
                   ["盐井", 7.5, None]])  # fmt: skip


# XLSX


def test_a_row_says_by_itself_what_it_means(tmp_path, read):
    (tmp_path / "a.xlsx").write_bytes(workbook(WELLS, ("Empty", []), ("Notes", [["Salt only"]])))
    document = read.only(tmp_path)
    assert document.text == (
        "# Wells\n\nName | Depth | Dug\nName: Yánjing | Depth: 12 | Dug: 1901-03-04\n"
        "Name: 盐井 | Depth: 7.5\n\n# Notes\n\nSalt only"
    )
    assert (document.title, document.metadata, document.pages) == ("a", {}, ())


def test_values_as_they_are_read_by_people(tmp_path, read):
    book = openpyxl.Workbook()
    sheet = book.active
    sheet.title = "S"
    moments = datetime.datetime(2021, 3, 4, 5, 6), datetime.time(7, 8)
    sheet.append([0.25, 0.1 + 0.2, True, *moments, "two\nlines _x000D_", 1234567890123456, "#N/A"])
    sheet["A1"].number_format = "0.0%"
    book.properties.title = " The\nbook "
    (tmp_path / "a.xlsx").write_bytes(saved(book))
    document = read.only(tmp_path)
    assert document.text == (
        "# S\n\n25.0% | 0.3 | TRUE | 2021-03-04 5:06:00 | 7:08:00 | two lines | 1234567890123456 | "
        "#N/A"
    )
    assert document.title == "The book"


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([["Report"], ["a", "b"], [1, 2]], "Report\n\na | b\na: 1 | b: 2"),
        ([["a", "a"], [1, 2]], "a | a\n1 | 2"),  # two columns of one name are none
        ([["a", 5], [1, 2]], "a | 5\n1 | 2"),
        ([["a", None, "b"], [1, 2, 3, 4]], "a | b\na: 1 | 2 | b: 3 | 4"),
        ([["a", "b"], [None, None], [None, 2]], "a | b\n\nb: 2"),
    ],
)
def test_what_names_the_columns(tmp_path, read, rows, text):
    (tmp_path / "a.xlsx").write_bytes(workbook(("S", rows)))
    assert read.only(tmp_path).text == f"# S\n\n{text}"


def test_hidden_sheets_and_formulas_without_a_value_are_no_text(tmp_path, read):
    book = openpyxl.Workbook()
    book.active["A1"] = "=1+1"
    book.create_sheet("Hidden").append(["secret"])
    book["Hidden"].sheet_state = "hidden"
    (tmp_path / "a.xlsx").write_bytes(saved(book))
    assert "holds no text in visible sheets" in read.refused(tmp_path)


def test_a_workbook_of_text_beyond_the_bound(tmp_path, read, monkeypatch):
    # The name of a column is there once, and said in every row.
    monkeypatch.setattr(files_module, "MAX_TEXT_CHARACTERS", 500)
    (tmp_path / "a.xlsx").write_bytes(workbook(("S", [["x" * 80, "y"], *[[1, 2]] * 10])))
    assert "Mi characters; split it" in read.refused(tmp_path)


def test_a_sheet_that_lies_about_its_size_is_as_wide_as_its_rows(tmp_path, read):
    data = edited(workbook(("S", [["a", "b"]])), sheet1=lambda part: re.sub(
        rb'<dimension ref="[^"]*"', b'<dimension ref="A1:XFD1048576"', part))  # fmt: skip
    (tmp_path / "a.xlsx").write_bytes(data)
    assert read.only(tmp_path).text == "# S\n\na | b"


def test_a_workbook_of_backslashes_and_of_styles_it_lacks(tmp_path, read):
    out = io.BytesIO()
    data = io.BytesIO(workbook(("S", [[0.5, "b"]])))
    with zipfile.ZipFile(data) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            part = old.read(name)
            if name.endswith("sheet1.xml"):
                assert b'<c r="A1"' in part
                part = part.replace(b'<c r="A1"', b'<c r="A1" s="77"')
            new.writestr(name.replace("/", "\\"), part)
    (tmp_path / "a.xlsx").write_bytes(out.getvalue())
    assert read.only(tmp_path).text == "# S\n\n0.5 | b"


def test_macros_are_no_text_and_their_files_are_refused(tmp_path, read):
    with_macro = io.BytesIO(workbook(WELLS))
    with zipfile.ZipFile(with_macro, "a") as archive:
        archive.writestr("xl/vbaProject.bin", b"Sub AutoOpen()")
    (tmp_path / "a.xlsx").write_bytes(with_macro.getvalue())
    assert "AutoOpen" not in read.only(tmp_path).text
    (tmp_path / "a.xlsx").rename(tmp_path / "a.xlsm")
    assert read.refused(tmp_path).endswith("; save it as .xlsx")


# PPTX


def slides():
    """A presentation of a title, a list with a table, a hidden slide, and a group with notes."""
    made = pptx.Presentation()
    first = made.slides.add_slide(made.slide_layouts[0])
    first.shapes.title.text = "Salt\vwells"
    first.placeholders[1].text = "of Yánjing"
    second = made.slides.add_slide(made.slide_layouts[1])
    second.shapes.title.text = "Depths"
    second.placeholders[1].text = "one\ntwo"
    table = second.shapes.add_table(2, 2, *[Inches(1)] * 4).table
    for place, text in enumerate(["Name", "Depth", "A", "12\nm"]):
        table.cell(place // 2, place % 2).text = text
    hidden = made.slides.add_slide(made.slide_layouts[5])
    hidden.shapes.title.text = "hidden"
    hidden.element.set("show", "0")
    last = made.slides.add_slide(made.slide_layouts[6])
    group = last.shapes.add_group_shape()
    group.shapes.add_textbox(*[Inches(1)] * 4).text_frame.text = "盐井靠人力开采。"
    last.notes_slide.notes_text_frame.text = "Say this.\nAnd that."
    return made


def test_slides_are_pages(tmp_path, read):
    (tmp_path / "a.pptx").write_bytes(saved(slides()))
    document = read.only(tmp_path)
    parts = [
        "# Salt wells\n\nof Yánjing",
        "# Depths\n\n- one\n- two\n\nName | Depth\nName: A | Depth: 12 m",
        "盐井靠人力开采。\n\nNotes: Say this.\n\nNotes: And that.",
    ]
    assert document.text == "\n\n".join(parts)
    assert document.title == "Salt wells"
    first, second, hidden, last = document.pages
    assert document.text[second:].startswith("# Depths")
    assert first == 0
    assert hidden == last
    assert document.text[last:] == parts[-1]


def test_a_presentation_without_titles_takes_the_one_that_it_says(tmp_path, read):
    made = pptx.Presentation()
    slide = made.slides.add_slide(made.slide_layouts[6])
    slide.shapes.add_textbox(*[Inches(1)] * 4).text_frame.text = "text"
    made.core_properties.title = "Said"
    (tmp_path / "a.pptx").write_bytes(saved(made))
    assert read.only(tmp_path).title == "Said"


def test_a_presentation_without_text_or_with_too_much(tmp_path, read, monkeypatch):
    (tmp_path / "a.pptx").write_bytes(saved(pptx.Presentation()))
    assert "holds no text" in read.refused(tmp_path)
    monkeypatch.setattr(files_module, "MAX_TEXT_CHARACTERS", 20)
    (tmp_path / "a.pptx").write_bytes(saved(slides()))
    assert "Mi characters; split it" in read.refused(tmp_path)


# Both


def some(kind):
    return workbook(WELLS) if kind == "xlsx" else saved(slides())


PART = {"xlsx": "sheet1", "pptx": "slide1"}


@pytest.mark.parametrize("kind", PART)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: b"", "cannot be parsed as"),
        (lambda data: data[: len(data) // 2], "cannot be parsed as"),
        (lambda data: b"PK\x05\x06" + bytes(18), "cannot be parsed as"),
        (lambda data: b"\xd0\xcf\x11\xe0" + bytes(600), "needs a password or has an older format"),
    ],
    ids=["empty", "half", "no parts", "encrypted"],
)
def test_files_that_are_none(tmp_path, read, kind, change, reason):
    (tmp_path / f"a.{kind}").write_bytes(change(some(kind)))
    assert reason in read.refused(tmp_path)


@pytest.mark.parametrize("kind", PART)
@pytest.mark.parametrize("used", ["&a11;", "&x;"], ids=["growing", "outside"])
def test_entities_neither_grow_nor_lead_outside(tmp_path, read, kind, used):
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    changed = []
    declared = LAUGHS if used == "&a11;" else OUTSIDE.format(secret.as_uri())

    def change(part):
        changed.append(b"Name" in part)
        start = part.index(b"?>") + 2 if part.startswith(b"<?xml") else 0
        return part[:start] + declared.encode() + part[start:].replace(b"Name", used.encode())

    name = "sheet1" if kind == "xlsx" else "slide2"
    path = tmp_path / f"a.{kind}"
    path.write_bytes(edited(some(kind), **{name: change}))
    good, bad = read(path)
    assert all("haha" not in it.text and "hidden" not in it.text for it in good)
    assert all("cannot be parsed as" in it.reason for it in bad)
    assert len(good) + len(bad) == 1
    assert changed == [True]
