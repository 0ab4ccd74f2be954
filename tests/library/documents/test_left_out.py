"""What readers leave out is counted by kind and place, in the metadata of the document."""

import json

import openpyxl
import pytest
from docx.oxml import parse_xml

from jaxrag.library.documents.left_out import LEFT_OUT, LeftOut, left_out_of

W = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
PICTURE = "data:image/png;base64," + "QUJD" * 100_000


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ([2, 3, 4, 7], "4 pages (2 to 4, 7)"),
        (["B4"], "1 page (B4)"),
        ([1, 3, 5, 7, 9, 11], "6 pages (1, 3, 5, 7, 9 and 1 more)"),
        ([None, None], "2 pages"),
        ([], None),
    ],
)
def test_a_kind_is_counted_and_its_places_named(places, said):
    found = LeftOut()
    for place in places:
        found.add("pages", place)
    assert left_out_of(found.metadata()) == ([said] if said else [])
    assert left_out_of({LEFT_OUT: "of another kind"}) == []


def test_symbols_of_a_docx_that_are_not_known(tmp_path, read, make_docx):
    def fill(document):
        document.add_paragraph("The payment is")
        for font in ("Wingdings", "House Icons"):
            inner = f'<w:r><w:sym w:font="{font}" w:char="F0FE"/></w:r>'
            document.element.body.insert(0, parse_xml(f"<w:p {W}>{inner}</w:p>"))

    (tmp_path / "loan.docx").write_bytes(make_docx(fill))
    document = read.only(tmp_path / "loan.docx")
    assert document.text == "☑\n\nThe payment is"
    assert left_out_of(document.metadata) == ["1 symbol"]


def test_formulas_of_a_sheet_without_a_value(tmp_path, read):
    book = openpyxl.Workbook()
    for row in (("Item", "Cost"), ("Paint", 12), ("Total", "=SUM(B2:B2)"), ("Half", "=B3/2")):
        book.active.append(row)
    book.create_sheet("Hidden").sheet_state = "hidden"
    book.save(tmp_path / "budget.xlsx")
    found = left_out_of(read.only(tmp_path / "budget.xlsx").metadata)
    assert sorted(found) == ["1 hidden sheet (Hidden)", "2 formulas without a value (B3, B4)"]


def test_share_of_a_page_that_is_kept(tmp_path, read):
    ferry = "<p>The ferry to Lund leaves at 9:40.</p>" * 20
    for name, page, said in (
        ("promo", f"{ferry}<article>Win a bicycle</article>", []),
        ("whole", f"<main>{ferry}</main><p>Below.</p>", []),
        ("part", f"{ferry}<main>Win a bicycle</main>", ["660 characters", "(2 % kept)"]),
    ):
        (tmp_path / f"{name}.html").write_text(f"<body>{page}</body>")
        document = read.only(tmp_path / f"{name}.html")
        assert ("9:40" in document.text) == (not said)
        lines = left_out_of(document.metadata)
        assert len(lines) == bool(said) and all(it in "".join(lines) for it in said), lines


MARKDOWN = f"""# Pump

Before ![valve A]({PICTURE}) and <img alt="tank B" src="{PICTURE}"> after.

![seen][one] `data:image/png` ![linked](a.png)

[one]: <{PICTURE}>
"""


@pytest.mark.parametrize("kind", ["md", "ipynb"])
def test_pictures_inlined_as_data(tmp_path, read, kind):
    text = MARKDOWN
    if kind == "ipynb":
        text = json.dumps({"cells": [{"cell_type": "markdown", "source": MARKDOWN}]})
    (tmp_path / f"pump.{kind}").write_text(text)
    document = read.only(tmp_path / f"pump.{kind}")
    kept = "# Pump Before valve A and tank B after. ![seen][one] `data:image/png` ![linked](a.png)"
    assert " ".join(document.text.split()) == kept
    assert left_out_of(document.metadata) == ["3 pictures inlined as data"]


def test_an_endless_picture_takes_no_time(tmp_path, read):
    endless = ("![a](data:image/png;base64," + "A" * 1000) * 2000
    (tmp_path / "endless.md").write_text("Text. " + endless)
    assert read.only(tmp_path / "endless.md").text.startswith("Text.")
