"""Documents of word processors whose text was read otherwise than they show it."""

import io
import re
import zipfile

import docx
from documents.cases import Case
from docx.oxml import parse_xml

NS = (
    'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main" '
    'xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math" '
    'xmlns:r="http://schemas.openxmlformats.org/officeDocument/2006/relationships" '
    'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006" '
    'xmlns:v="urn:schemas-microsoft-com:vml"'
)
LEVEL = (
    '<w:lvl w:ilvl="{}"><w:start w:val="{}"/><w:numFmt w:val="{}"/><w:lvlText w:val="{}"/></w:lvl>'
)
LEVELS = "".join(map(LEVEL.format, (0, 1, 2), (3, 1, 1), ("decimal", "lowerLetter", "lowerRoman"),
                     ("Clause %1", "%2)", "%1.%2.%3")))  # fmt: skip
LISTS = f"""<w:abstractNum w:abstractNumId="70">{LEVELS}</w:abstractNum>
<w:num w:numId="70"><w:abstractNumId w:val="70"/></w:num>
<w:num w:numId="71"><w:abstractNumId w:val="70"/><w:lvlOverride w:ilvl="0">
<w:startOverride w:val="9"/></w:lvlOverride></w:num>"""


def document(*inner, fill=None):
    """Writes paragraphs, each the XML of its runs; what begins with a tag of a block is one."""

    def write(path):
        made = docx.Document()
        if fill is not None:
            fill(made)
        body = made.element.body
        for it in inner:
            block = it if it.startswith(("<w:p>", "<w:tbl>", "<w:altChunk")) else f"<w:p>{it}</w:p>"
            xml = re.sub(r"^<w:\w+", lambda found: f"{found[0]} {NS}", block)
            body.insert(len(body) - 1, parse_xml(xml))
        made.save(path)

    return write


def run(text, form=""):
    return f'<w:r><w:rPr>{form}</w:rPr><w:t xml:space="preserve">{text}</w:t></w:r>'


def sign(font, char):
    return f'<w:r><w:sym w:font="{font}" w:char="{char}"/></w:r>'


def maths(text):
    return f"<m:oMath>{text}</m:oMath>"


def letters(text):
    return f"<m:r><m:t>{text}</m:t></m:r>"


def cell(text, form=""):
    return f"<w:tc><w:tcPr>{form}</w:tcPr><w:p>{run(text)}</w:p></w:tc>"


def table(*lines):
    rows = "".join(line if line.startswith("<w:tr") else f"<w:tr>{line}</w:tr>" for line in lines)
    return f"<w:tbl><w:tblPr/>{rows}</w:tbl>"


WIDE, TOP, BELOW = (
    '<w:gridSpan w:val="2"/>',
    '<w:vMerge w:val="restart"/>',
    "<w:vMerge/>",
)
HIGH, LOW = '<w:vertAlign w:val="superscript"/>', '<w:vertAlign w:val="subscript"/>'


def long_table(made):
    rows = made.add_table(rows=121, cols=3).rows
    for at, row in enumerate(rows):
        texts = ("Station", "Depth", "Keeper") if not at else (f"S{at}", f"{at} m", f"Keeper {at}")
        for it, text in zip(row.cells, texts, strict=True):
            it.text = text


def lists(made):
    """Numbered by lists of the document's own."""
    numbering = made.part.numbering_part.element
    first = numbering.find("{*}num")
    for it in parse_xml(f"<x {NS}>{LISTS}</x>"):
        if it.tag.endswith("abstractNum"):
            first.addprevious(it)
        else:
            numbering.append(it)
    made.add_heading("Terms", 1)
    for number, level, text in (
        (70, 0, "covers pets."), (70, 1, "Cats."), (70, 1, "Dogs."), (70, 2, "Small ones."),
        (70, 0, "covers cars."), (70, 1, "Vans."), (71, 0, "covers boats."),
    ):  # fmt: skip
        properties = made.add_paragraph(text)._p.get_or_add_pPr()
        properties.get_or_add_numPr().get_or_add_numId().val = number
        properties.get_or_add_numPr().get_or_add_ilvl().val = level


def by_styles(made):
    for text in ("Rent is due monthly.", "A late fee applies."):
        made.add_paragraph(text, style="List Number")
    made.add_paragraph("Clause 2 does not apply in June.")
    made.add_paragraph("Keys are with Ann.", style="List Bullet")


def numbered_headings(made):
    lists(made)
    for text in ("Rent", "Pets"):
        heading = made.add_heading(text, 2)
        properties = heading._p.get_or_add_pPr().get_or_add_numPr()
        properties.get_or_add_numId().val = 70
        properties.get_or_add_ilvl().val = 0


def with_chunk(kind, name, data):
    """Writes a document with another one embedded between two paragraphs."""

    def write(path):
        plain = io.BytesIO()
        chunk = '<w:altChunk r:id="rIdChunk"/>'
        document(run("Before."), chunk, run("After."))(plain)
        relation = (
            f'<Relationship Id="rIdChunk" Target="{name}" Type="http://schemas.openxmlformats.org/'
            'officeDocument/2006/relationships/aFChunk"/></Relationships>'
        )
        suffix = name.rpartition(".")[2]
        types = f'<Default Extension="{suffix}" ContentType="{kind}"/></Types>'
        with zipfile.ZipFile(plain) as old, zipfile.ZipFile(path, "w") as new:
            for it in old.namelist():
                part = old.read(it)
                if it == "word/_rels/document.xml.rels":
                    part = part.replace(b"</Relationships>", relation.encode())
                elif it == "[Content_Types].xml":
                    part = part.replace(b"</Types>", types.encode())
                new.writestr(it, part)
            new.writestr(f"word/{name}", data)

    return write


def up(made):
    made.styles.add_style("Up", 2).font.superscript = True


def hidden_style(made):
    style = made.styles.add_style("Draft", 1)
    style.font.hidden = True
    made.add_paragraph("Never say 999.", style="Draft")
    shown = made.add_paragraph("", style="Draft").add_run("But say 100.")
    shown.font.hidden = False


POWER = "<m:sSup><m:e>{}</m:e><m:sup>{}</m:sup></m:sSup>".format
HALF = "<m:f><m:num>{}</m:num><m:den>{}</m:den></m:f>".format

CASES = [
    Case("hidden text", "draft.docx",
         document(run("The price is 100. "), run("Hidden: 999.", "<w:vanish/>")),
         kept=("The price is 100.",), invented=("999",), said=("1 hidden passage",)),
    Case("hidden text", "draft-style.docx", document(fill=hidden_style),
         kept=("But say 100.",), invented=("999",), said=("1 hidden passage",)),
    Case("hidden text", "not-hidden.docx", document(run("Seen.", '<w:vanish w:val="0"/>')),
         kept=("Seen.",)),
    Case("hidden text", "hidden-row.docx",
         document(table(cell("Item") + cell("Price"),
                        "<w:tr><w:trPr><w:hidden/></w:trPr>" + cell("Cost") + cell("7") + "</w:tr>",
                        cell("Desk") + cell("90"))),
         kept=("Item: Desk | Price: 90",), invented=("Cost",), said=("1 hidden row",)),
    Case("tracked changes", "agenda.docx",
         document("<w:moveFrom>" + run("Pay by May.") + "</w:moveFrom>", run("Coffee."),
                  "<w:moveTo>" + run("Pay by May.") + "</w:moveTo>"),
         kept=("Coffee. Pay by May.",), invented=("Pay by May. Coffee",)),
    Case("tracked changes", "price.docx",
         document(run("It is ") + "<w:del><w:r><w:delText>100</w:delText></w:r></w:del><w:ins>"
                  + run("120") + "</w:ins>" + run(" euros, not ") + run("90", "<w:strike/>")),
         kept=("It is 120 euros, not ~~90~~",), invented=("100",)),
    Case("tracked changes", "deleted-row.docx",
         document(table(cell("Item") + cell("Price"),
                        "<w:tr><w:trPr><w:del/></w:trPr>" + cell("Chair") + cell("40") + "</w:tr>",
                        cell("Desk") + cell("90"))),
         kept=("Item: Desk | Price: 90",), invented=("Chair",)),
    Case("raised text", "tank.docx",
         document(run("It holds 10") + run("6", HIGH) + run(" litres of H") + run("2", LOW)
                  + run("O, on 25 m") + run("2", HIGH) + run(".")),
         kept=("It holds 10^6 litres of H_2O, on 25 m^2.",), invented=("106",)),
    Case("raised text", "logarithm.docx",
         document(run("log") + run("2", LOW) + run("8 is 3, e") + run("-x/2", HIGH)
                  + run(", the 1") + run("st", HIGH) + run(" of May")),
         kept=("log_(2)8 is 3, e^(-x/2), the 1st of May",), invented=("28",)),
    Case("raised text", "by-style.docx",
         document(run("10") + run("9", '<w:rStyle w:val="Up"/>') + run(" stars, 2")
                  + run("53", '<w:position w:val="8"/>') + run(" grains in 4")
                  + run("2", '<w:vertAlign w:val="baseline"/>') + run(" boxes"), fill=up),
         kept=("10^9 stars, 2^53 grains in 42 boxes",), invented=("109", "253")),
    Case("raised text", "footnote.docx",
         document(run("Revenue was 45") + run("1", HIGH) + run(" million")
                  + '<w:r><w:footnoteReference w:id="1"/></w:r>' + run(" in all.")),
         kept=("45^1 million in all.",), invented=("451",)),
    Case("merged cells", "sales.docx",
         document(table(cell("Region") + cell("Product") + cell("Units"),
                        cell("Europe", TOP) + cell("Cable") + cell("12"),
                        cell("", BELOW) + cell("Hub") + cell("7"))),
         kept=("Region: Europe | Product: Hub | Units: 7",)),
    Case("merged cells", "years.docx",
         document(table(cell("Product", TOP) + cell("2023", WIDE) + cell("2024", WIDE),
                        cell("", BELOW) + "".join(map(cell, ("Q1", "Q2", "Q1", "Q2"))),
                        "".join(map(cell, ("Cable", "5", "6", "7", "8"))))),
         kept=("Product: Cable | 2023 Q1: 5 | 2023 Q2: 6 | 2024 Q1: 7 | 2024 Q2: 8",)),
    Case("merged cells", "indented-row.docx",
         document(table(cell("Tour") + cell("Spring") + cell("Autumn"),
                        cell("Lake") + cell("closed", WIDE),
                        '<w:tr><w:trPr><w:gridBefore w:val="1"/></w:trPr>' + cell("5") + cell("6")
                        + "</w:tr>")),
         kept=("Tour: Lake | Spring: closed | Autumn: closed", "Spring: 5 | Autumn: 6"),
         invented=("Tour: 5",)),
    Case("signs", "lease.docx",
         document(sign("Wingdings", "F0FE") + run(" Smoking ") + sign("Wingdings", "F0A8")
                  + run(" Pets ") + sign("MS Gothic", "2612") + run(" Cars")),
         kept=("☑ Smoking ☐ Pets ☒ Cars",)),
    Case("signs", "angle.docx",
         document(run("At 45") + sign("Symbol", "F0B0") + run(", x ") + sign("Symbol", "F0B3")
                  + run(" 3 and ") + run("\uf061", '<w:rFonts w:ascii="Symbol"/>')),
         kept=("At 45°, x ≥ 3 and α",)),
    Case("signs", "boxes.docx",
         document('<w:r><w:fldChar w:fldCharType="begin"><w:ffData><w:checkBox><w:checked/>'
                  "</w:checkBox></w:ffData></w:fldChar></w:r>" + run("Paid ")
                  + '<w:r><w:fldChar w:fldCharType="begin"><w:ffData><w:checkBox><w:default '
                  'w:val="0"/></w:checkBox></w:ffData></w:fldChar></w:r>' + run("Sent")),
         kept=("☒ Paid ☐ Sent",)),
    Case("signs", "house-font.docx", document(run("Logo ") + sign("House Icons", "F041")),
         kept=("Logo",), said=("1 symbol",)),
    Case("list numbers", "rent.docx", document(fill=by_styles),
         kept=("1. Rent is due", "2. A late fee", "Clause 2 does not apply", "- Keys are")),
    Case("list numbers", "clauses.docx", document(fill=lists),
         kept=("# Terms", "Clause 3 covers pets.", "a) Cats.", "b) Dogs.", "3.b.i Small ones.",
               "Clause 4 covers cars.", "a) Vans.", "Clause 9 covers boats.")),
    Case("list numbers", "numbered-headings.docx", document(fill=numbered_headings),
         kept=("Clause 9 covers boats.", "## Clause 10 Rent", "## Clause 11 Pets")),
    Case("embedded documents", "chunk-html.docx",
         with_chunk("text/html", "chunk.html", "<body><p>Storks nest in May.</p></body>"),
         kept=("Before. Storks nest in May. After.",)),
    Case("embedded documents", "chunk-text.docx",
         with_chunk("text/plain", "chunk.txt", "Herons nest in June."),
         kept=("Before. Herons nest in June. After.",)),
    Case("embedded documents", "chunk-rtf.docx",
         with_chunk("application/rtf", "chunk.rtf", r"{\rtf1 Owls nest in July.}"),
         kept=("Before. After.",), said=("1 embedded document",)),
    Case("equations", "loan.docx",
         document(run("The payment is ") + maths(letters("P=0.0125·L")) + run(" for all loans.")),
         kept=("The payment is P=0.0125·L for all loans.",)),
    Case("equations", "energy.docx",
         document(maths(letters("E=m") + POWER(letters("c"), letters("2")))), kept=("E=mc^2",)),
    Case("equations", "mean.docx",
         document(maths(letters("m=") + HALF(letters("a+b"), letters("2")) + "<m:rad><m:deg/><m:e>"
                        + letters("x") + "</m:e></m:rad>")),
         kept=("m=(a+b)/2sqrt(x)",)),
    Case("names of columns", "stations.docx", document(fill=long_table),
         kept=("Station: S1 | Depth: 1 m | Keeper: Keeper 1",
               "Station: S120 | Depth: 120 m | Keeper: Keeper 120")),
    Case("names of columns", "form.docx",
         document(table(cell("Prepared by") + cell("Kim"), cell("Date") + cell("2024-05-01"),
                        cell("Pages") + cell("12"))),
         kept=("Prepared by", "Kim", "Date", "2024-05-01", "Pages", "12"),
         invented=("Kim: ", "Prepared by: Date")),
    Case("names of columns", "marked.docx",
         document(table("<w:tr><w:trPr><w:tblHeader/></w:trPr>" + cell("Term") + cell("Meaning")
                        + "</w:tr>", cell("tarn") + cell("a lake"))),
         kept=("Term: tarn | Meaning: a lake",)),
]  # fmt: skip
