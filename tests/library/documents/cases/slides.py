"""Presentations whose slides show what was not read, or read otherwise."""

import pptx
from documents.cases import Case
from pptx.oxml import parse_xml
from pptx.util import Inches

NS = (
    'xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main" '
    'xmlns:p="http://schemas.openxmlformats.org/presentationml/2006/main" '
    'xmlns:a14="http://schemas.microsoft.com/office/drawing/2010/main" '
    'xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math" '
    'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006"'
)
PLACE = [Inches(1)] * 4


def slide(fill):
    """Writes a presentation of one slide without placeholders."""

    def write(path):
        made = pptx.Presentation()
        fill(made.slides.add_slide(made.slide_layouts[6]))
        made.save(path)

    return write


def shape(paragraph, form=""):
    return (
        f'<p:sp {NS}><p:nvSpPr><p:cNvPr id="9" name="t" {form}/><p:cNvSpPr/><p:nvPr/></p:nvSpPr>'
        f"<p:spPr/><p:txBody><a:bodyPr/>{paragraph}</p:txBody></p:sp>"
    )


def run(text, form=""):
    return f"<a:r><a:rPr {form}/><a:t>{text}</a:t></a:r>"


def box(*paragraphs, form=""):
    xml = shape("".join(f"<a:p>{it}</a:p>" for it in paragraphs), form)
    return slide(lambda made: made.shapes._spTree.append(parse_xml(xml)))


def chosen(paragraph, instead):
    """A box of newer programs, and what older ones show."""
    return slide(lambda made: made.shapes._spTree.append(parse_xml(
        f'<mc:AlternateContent {NS}><mc:Choice Requires="a14">{shape(f"<a:p>{paragraph}</a:p>")}'
        f"</mc:Choice><mc:Fallback>{shape(f'<a:p>{instead}</a:p>')}</mc:Fallback>"
        "</mc:AlternateContent>")))  # fmt: skip


def grid(rows, merged):
    """A table; ``merged`` are its first and last cells."""

    def fill(made):
        table = made.shapes.add_table(len(rows), len(rows[0]), *PLACE).table
        for at, line in enumerate(rows):
            for column, text in enumerate(line):
                table.cell(at, column).text = text
        for first, last in merged:
            table.cell(*first).merge(table.cell(*last))

    return slide(fill)


def equation(inner):
    return f"<a14:m><m:oMath>{inner}</m:oMath></a14:m>"


POWER = "<m:sSup><m:e><m:r><m:t>r</m:t></m:r></m:e><m:sup><m:r><m:t>2</m:t></m:r></m:sup></m:sSup>"
NUMBERED = '<a:pPr><a:buAutoNum type="{}"/></a:pPr>'.format

CASES = [
    Case("boxes of newer programs", "area.pptx",
         chosen(run("The area is ") + equation(POWER) + run(" times pi."), run("picture")),
         kept=("The area is r^2 times pi.",), invented=("picture",)),
    Case("boxes of newer programs", "plain-words.pptx",
         chosen(run("Boats leave at 9."), run("Get a newer program.")),
         kept=("Boats leave at 9.",), invented=("newer",)),
    Case("boxes of newer programs", "only-equation.pptx",
         chosen(equation(POWER + "<m:r><m:t>=4</m:t></m:r>"), run(" ")), kept=("r^2=4",)),
    Case("raised text", "stars.pptx", box(run("10") + run("9", 'baseline="30000"') + run(" stars")),
         kept=("10^9 stars",), invented=("109",)),
    Case("raised text", "water.pptx",
         box(run("H") + run("2", 'baseline="-25000"') + run("O, ")
             + run("5 euros", 'strike="sngStrike"')),
         kept=("H_2O, ~~5 euros~~",)),
    Case("raised text", "flat.pptx", box(run("10", 'baseline="0"') + run("9 stars")),
         kept=("109 stars",), invented=("^",)),
    Case("merged cells", "regions.pptx",
         grid([["Region", "Product", "Units"], ["Europe", "Cable", "12"], ["", "Hub", "7"]],
              [((1, 0), (2, 0))]),
         kept=("Region: Europe | Product: Hub | Units: 7",)),
    Case("merged cells", "quarters.pptx",
         grid([["", "2023", "", "2024", ""], ["Product", "Q1", "Q2", "Q1", "Q2"],
               ["Cable", "5", "6", "7", "8"]], [((0, 1), (0, 2)), ((0, 3), (0, 4))]),
         kept=("Product: Cable | 2023 Q1: 5 | 2023 Q2: 6 | 2024 Q1: 7 | 2024 Q2: 8",)),
    Case("merged cells", "closed.pptx",
         grid([["Tour", "Spring", "Autumn"], ["Lake", "closed", ""], ["Hill", "5", "6"]],
              [((1, 1), (1, 2))]),
         kept=("Tour: Lake | Spring: closed | Autumn: closed",)),
    Case("hidden text", "hidden-box.pptx", box(run("Do not say 999."), form='hidden="1"'),
         refused="holds no text"),
    Case("list numbers", "steps.pptx",
         box(NUMBERED("arabicPeriod") + run("Open"), NUMBERED("arabicPeriod") + run("Close"),
             run("Step 2 is safe.")),
         kept=("1. Open", "2. Close", "Step 2 is safe.")),
    Case("list numbers", "letters.pptx",
         box(NUMBERED("alphaLcParenR") + run("Cats"), NUMBERED("alphaLcParenR") + run("Dogs")),
         kept=("a) Cats", "b) Dogs")),
]  # fmt: skip
