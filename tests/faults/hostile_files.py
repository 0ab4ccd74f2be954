"""Files, folders and questions that cost more than they hold, and what must be said of each."""

import io
import json
import os
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import docx
import openpyxl
import pptx
from hostile_case import Case

DEEP = 200_000
SECONDS, MEMORY = "3", "1GB"  # of the limits of a parser
TOO_MUCH = "raise parse_(seconds|bytes)"

Fill = Callable[[Path], Any]


def command(folder: Path, *options: str) -> list[str]:
    """Ingest a folder ``in``, under limits that are lower than the default ones."""
    return ["ingest", str(folder / "in"), "--kb", str(folder / "kb"),
            "--model", str(folder / "model"), "--parse-seconds", SECONDS,
            "--parse-bytes", MEMORY, *options]  # fmt: skip


def file(
    name: str, fill: Fill, says: str = "", *, lines: int = 1, documents: int = 1, options: str = ""
) -> Case:
    """A folder with a good file and what ``fill`` writes; without ``says`` it is read."""

    def make(folder: Path) -> list[str]:
        (folder / "in").mkdir()
        (folder / "in" / "good.txt").write_text("The river is copper.")
        fill(folder / "in")
        return command(folder, *options.split())

    return Case(name, make, "left out" if says else "done", says, lines, documents)


def text(name: str, content: str | bytes | Callable[[], bytes]) -> Fill:
    def fill(folder: Path) -> None:
        made = content() if callable(content) else content
        (folder / name).write_bytes(made if isinstance(made, bytes) else made.encode())

    return fill


def late(fill: Callable[[], Fill]) -> Fill:
    """What is made when it is needed, for the cases of all processes are large together."""
    return lambda folder: fill()(folder)


def edited(made: Any = None, **changes: Callable[[bytes], bytes]) -> bytes:
    """A .docx of one paragraph, or another file, with parts changed named so: ``word_document``."""
    plain, out = io.BytesIO(), io.BytesIO()
    if made is None:
        made = docx.Document()
        made.add_paragraph("copper")
    made.save(plain)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            change = changes.get(name.replace("/", "_").partition(".")[0], lambda part: part)
            new.writestr(name, change(old.read(name)))
    return out.getvalue()


def word(change: Callable[[bytes], bytes]) -> Fill:
    """A .docx whose body is changed."""
    return text("a.docx", lambda: edited(word_document=change))


def inside(markup: bytes, end: bytes = b"") -> Callable[[bytes], bytes]:
    return lambda part: part.replace(b"<w:body>", b"<w:body>" + markup + end)


def lying() -> bytes:
    """Of 300 MB, while its directory says that they are 1,000 bytes."""
    data = edited(word_document=lambda part: part + b" " * (300 << 20))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        true = archive.getinfo("word/document.xml").file_size
    return data.replace(true.to_bytes(4, "little"), (1000).to_bytes(4, "little"))


def pictured() -> bytes:
    out = io.BytesIO(edited())
    with zipfile.ZipFile(out, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/media/image1.png", bytes(300 << 20))
    return out.getvalue()


def entity(definition: bytes, use: bytes) -> Callable[[bytes], bytes]:
    def change(part: bytes) -> bytes:
        start = part.index(b"?>") + 2
        kind = b"<!DOCTYPE d [" + definition + b"]>"
        whole = part[:start] + kind + part[start:]
        return inside(b"<w:p><w:r><w:t>" + use + b"</w:t></w:r></w:p>")(whole)

    return change


LAUGHS = b'<!ENTITY a0 "ha">' + b"".join(
    b'<!ENTITY a%d "%s">' % (n, b"&a%d;" % (n - 1) * 10) for n in range(1, 12)
)


def pdf(*objects: bytes) -> bytes:
    """Objects 1 and on, the first of them the catalog, with a table of their places."""
    out, places = b"%PDF-1.7\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    size = len(objects) + 1
    tail = b"xref\n0 %d\n0000000000 65535 f \n%s" % (size, table)
    trailer = b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (size, len(out))
    return out + tail + trailer


ROOT = b"<< /Type /Catalog /Pages 2 0 R >>"
PAGES = b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>"
FONT = b"/Font << /F << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >>"
PAGE = (
    b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R /Resources << "
    + FONT + b" >> >>"
)  # fmt: skip


def stream(data: bytes, extra: bytes = b"") -> bytes:
    return b"<< /Length %d %s >>\nstream\n%s\nendstream" % (len(data), extra, data)


def flate(data: bytes) -> bytes:
    return stream(zlib.compress(data), b"/Filter /FlateDecode")


def drawn(operators: bytes, resources: bytes = b"", *more: bytes) -> Fill:
    """A PDF whose one page is drawn so."""
    page = PAGE.replace(b"/Resources <<", b"/Resources << " + resources)
    return text("a.pdf", lambda: pdf(ROOT, PAGES, page, flate(operators), *more))


LINE = b"BT /F 12 Tf (copper) Tj ET\n"
_BOX = b"/Type /XObject /Subtype /Form /BBox [0 0 9 9] /Resources << /XObject << /X 5 0 R >> >>"

DOCX = (
    file("docx: a part of 600 MB",
         word(lambda part: part + b" " * (600 << 20)), "unpacks to more than"),
    file("docx: a directory that lies about 300 MB", text("a.docx", lying), "Bad CRC-32|unpacks"),
    file("docx: a picture of 300 MB",
         text("a.docx", pictured), documents=2),
    file("docx: entities that grow to 2 * 10^11 letters",
         word(entity(LAUGHS, b"&a11;")), "cannot be parsed as DOCX|" + TOO_MUCH),
    file("docx: an entity of a file",
         word(entity(b'<!ENTITY x SYSTEM "file:///etc/passwd">', b"&x;")), documents=2),
    file("docx: 5,000 tables in one another",
         word(inside(b"<w:tbl><w:tr><w:tc>" * 5000, b"</w:tc></w:tr></w:tbl>" * 5000)),
         "cannot be parsed as DOCX"),
    file("docx: 1,500,000 paragraphs",
         late(lambda: word(inside(b"<w:p/>" * 1_500_000))), TOO_MUCH + "|tags; split"),
    file("docx: 5,000,000 tags", late(lambda: word(inside(b"<w:p/>" * 5_000_000))),
         "tags; split the file"),
    file("docx: no archive", text("a.docx", b"PK\x03\x04" + bytes(99)), "cannot be parsed as DOCX"),
    file("docx: an archive of nothing",
         text("a.docx", b"PK\x05\x06" + bytes(18)), "cannot be parsed as DOCX"),
)  # fmt: skip
PDF = (
    file("pdf: pages that are their own children",
         text("a.pdf", pdf(ROOT, b"<< /Type /Pages /Kids [2 0 R 2 0 R] /Count 2 >>")),
         "PDF|text layer|page", lines=2),
    file("pdf: a page that is its own parent",
         text("a.pdf", pdf(ROOT, PAGES, PAGE.replace(b"/Parent 2", b"/Parent 3"), stream(LINE))),
         documents=2),
    file("pdf: pages without end",
         text("a.pdf", pdf(ROOT, PAGES.replace(b"/Count 1", b"/Count 1000000000"), PAGE,
                           stream(LINE))), documents=2),
    file("pdf: a form that draws itself",
         drawn(b"/X Do", b"/XObject << /X 5 0 R >>", stream(b"/X Do /X Do", _BOX)),
         "text layer|page|" + TOO_MUCH, lines=1),
    file("pdf: a stream of 1 GB", late(lambda: drawn(b" " * (1 << 30))), "page|" + TOO_MUCH),
    file("pdf: 4,000,000 operators", late(lambda: drawn(b"q Q " * 2_000_000)),
         TOO_MUCH + "|text layer|page"),
    file("pdf: 300,000 lines of text", late(lambda: drawn(LINE * 300_000)), TOO_MUCH),
    file("pdf: arrays in one another", drawn(b"[" * DEEP), "page|text layer|" + TOO_MUCH),
    file("pdf: objects in one another", text("a.pdf", pdf(b"<< /A " * DEEP)), "PDF|" + TOO_MUCH),
    file("pdf: no PDF", text("a.pdf", b"%PDF-1.7\n" + bytes(99)), "cannot be parsed as PDF"),
    file("pdf: half of one", text("a.pdf", pdf(ROOT, PAGES, PAGE, stream(LINE))[:200]), "PDF"),
)  # fmt: skip
HTML = (
    file("html: 100,000 deep", text("a.html", "<div>" * 100_000 + "x"), "nested too deeply"),
    file("html: an attribute of 30 MB",
         text("a.html", lambda: b'<p a="' + b"x" * (30 << 20) + b'">copper'), documents=2),
    file("html: 200,000 unfinished declarations",
         text("a.html", "<meta " * 200_000 + "<p>copper"), documents=2),
    file("html: entities that grow",
         text("a.html", b"<!DOCTYPE d [" + LAUGHS + b"]><p>copper &a11;"), documents=2),
    file("html: 5,000,000 tags", text("a.html", lambda: b"<p>" * 5_000_000),
         "tags; split the file"),
    file("html: 1,400,000 paragraphs", text("a.html", lambda: b"<p>a<i>b</i>" * 1_300_000),
         TOO_MUCH),
    file("html: NULs and surrogates",
         text("a.html", b"<p>copper \0 &#55296; &#0; \xed\xa0\x80"), "UTF-8"),
    file("html: an encoding of nobody", text("a.html", b"<meta charset=klingon>x"), documents=2),
    file("html: a text of 60 MB",
         text("a.html", lambda: b"<p>" + b"river " * (10 << 20)), TOO_MUCH + "|split the"),
)  # fmt: skip


def book() -> Any:
    made = openpyxl.Workbook()
    made.active.append(["copper", "river"])
    return made


def sheet(change: Callable[[bytes], bytes]) -> Fill:
    """An .xlsx whose only sheet is changed."""
    return text("a.xlsx", lambda: edited(book(), xl_worksheets_sheet1=change))


def rows(count: int, cell: bytes) -> Callable[[bytes], bytes]:
    def change(part: bytes) -> bytes:
        more = b"".join(b'<row r="%d">%s</row>' % (n, cell % n) for n in range(2, count + 2))
        return part.replace(b"</sheetData>", more + b"</sheetData>")

    return change


def repeated() -> bytes:
    """A column whose name of 30,000 letters is said with each of its 20,000 numbers."""
    made = book()
    made.active["A1"] = "x" * 30_000
    cells = rows(20_000, b'<c r="A%d"><v>1</v></c>')
    return edited(made, xl_worksheets_sheet1=cells)


def slides(change: Callable[[bytes], bytes]) -> Fill:
    """A .pptx whose only slide is changed."""

    def make() -> bytes:
        made = pptx.Presentation()
        made.slides.add_slide(made.slide_layouts[5]).shapes.title.text = "copper"
        return edited(made, ppt_slides_slide1=change)

    return text("a.pptx", make)


def chapters(chapter: bytes, package: bytes = b'<itemref idref="a"/>', href: bytes = b"a.xhtml",
             head: bytes = b"", blanks: int = 0) -> Fill:  # fmt: skip
    """An .epub of one chapter, which its package refers to so."""

    def make() -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("META-INF/container.xml",
                             '<container><rootfile full-path="o.opf"/></container>')  # fmt: skip
            item = b'<item id="a" href="%s"/>' % href
            archive.writestr("o.opf", head + b"<package>" + item + package + b"</package>")
            archive.writestr("a.xhtml", chapter + b" " * blanks)
        return out.getvalue()

    return text("a.epub", make)


TYPE = b"<!DOCTYPE d [" + LAUGHS + b'<!ENTITY x SYSTEM "file:///etc/passwd">]>'
OFFICE = (
    file("xlsx: a sheet of 600 MB", sheet(lambda part: part + b" " * (600 << 20)),
         "unpacks to more than"),
    file("xlsx: entities that grow", sheet(lambda part: TYPE + part.replace(b"</row>",
         b'<c r="C1" t="inlineStr"><is><t>&a11;</t></is></c></row>')),
         "cannot be parsed as XLSX|" + TOO_MUCH),
    file("xlsx: 300,000 rows that are 16,384 columns wide",
         sheet(rows(300_000, b'<c r="XFD%d"><v>1</v></c>')), TOO_MUCH),
    file("xlsx: a row 4,000,000,000", sheet(lambda part: part.replace(b'r="1"', b'r="4000000000"')),
         "XLSX|holds no text"),
    file("xlsx: a long name of a column, said 20,000 times",
         text("a.xlsx", repeated), "split it|" + TOO_MUCH),
    file("xlsx: an archive of nothing",
         text("a.xlsx", b"PK\x05\x06" + bytes(18)), "cannot be parsed as XLSX"),
    file("pptx: a slide of 600 MB", slides(lambda part: part + b" " * (600 << 20)),
         "unpacks to more than"),
    file("pptx: groups 5,000 deep", slides(lambda part: part.replace(
         b"</p:spTree>", b"<p:grpSp>" * 5000 + b"</p:grpSp>" * 5000 + b"</p:spTree>")),
         "cannot be parsed as PPTX"),
    file("pptx: groups 250 deep", slides(lambda part: part.replace(
         b"</p:spTree>", b"<p:grpSp>" * 230 + b"</p:grpSp>" * 230 + b"</p:spTree>")),
         documents=2),
    file("pptx: 5,000,000 tags", slides(lambda part: part.replace(
         b"</p:spTree>", b"<p:sp/>" * 5_000_000 + b"</p:spTree>")), "tags; split the file"),
    file("pptx: no archive", text("a.pptx", b"PK\x03\x04" + bytes(99)), "cannot be parsed as PPTX"),
)  # fmt: skip
MARKUP = (
    file("epub: a chapter of 600 MB",
         chapters(b"<p>", blanks=600 << 20), "unpacks to more than"),
    file("epub: entities that grow", chapters(TYPE + b"<p>copper &a11;</p>"), documents=2),
    file("epub: an entity of a file", chapters(TYPE + b"<p>copper &x;</p>"), documents=2),
    file("epub: entities that grow in its package",
         chapters(b"<p>copper", b"<title>&a11;</title>", head=TYPE), "cannot be parsed as EPUB"),
    file("epub: a chapter outside of it",
         chapters(b"<p>copper", href=b"../../../../etc/passwd.xml"), "is not in it"),
    file("epub: a chapter read 1,000,000 times",
         late(lambda: chapters(b"<p>copper", b'<itemref idref="a"/>' * 1_000_000)), documents=2),
    file("epub: 100,000 deep", chapters(b"<div>" * 100_000 + b"x"), "nested too deeply"),
    file("rst: lists 1,000 deep",
         text("a.rst", lambda: "".join(" " * n + "- x\n\n" for n in range(1_000))),
         "reStructuredText|" + TOO_MUCH),
    file("rst: a substitution of 1 MB, 10,000 times", text(
         "a.rst", lambda: ".. |a| replace:: " + "x " * 400_000 + "\n\n" + "|a| " * 10_000),
         "split it|" + TOO_MUCH),
    file("rst: substitutions in one another",
         text("a.rst", "".join(f".. |a{n}| replace:: " + f"|a{n + 1}| " * 10 + "\n"
                               for n in range(12)) + ".. |a12| replace:: copper\n\n|a0|\n"),
         "split it|" + TOO_MUCH),
    file("rst: 1,000,000 marks that begin nothing", text("a.rst", "*`|_:" * 200_000), TOO_MUCH),
    file("rst: a file of elsewhere",
         text("a.rst", "copper\n\n.. include:: /etc/passwd\n\n.. raw:: html\n   :file: /etc/hosts"),
         documents=2),
    file("org: a row that never ends", text("a.org", "| " + "copper " * 100_000), documents=2),
    file("org: 1,000,000 headings", text("a.org", lambda: b"* a\n" * 1_000_000), TOO_MUCH),
    file("org: a heading 100,000 deep", text("a.org", "*" * 100_000 + " copper"), documents=2),
)  # fmt: skip


NEXT = b'\n{"text": "copper", "id": "next"}\n'
JSON = (
    file("json: lists 200,000 deep", text("a.json", "[" * DEEP), "not JSON|RecursionError"),
    file("json lines: lists 200,000 deep",
         text("a.jsonl", b"[" * DEEP + NEXT), "not JSON", documents=2),
    file("json lines: metadata 900 deep",
         text("a.jsonl", b'{"text": "a", "m": %s%s}' % (b"[" * 900, b"]" * 900)), documents=2),
    file("json lines: metadata 100,000 deep",
         text("a.jsonl", b'{"text": "a", "m": %s%s}' % (b"[" * 10**5, b"]" * 10**5) + NEXT),
         "JSON", documents=2),
    *(file(f"json lines: {name}", text("a.jsonl", b'{"text": "a", "m": %s}' % value + NEXT), "JSON",
           documents=2)
      for name, value in (("NaN", b"NaN"), ("1e999", b"1e999"), ("5,000 digits", b"9" * 5000))),
    file("json lines: half of a surrogate pair",
         text("a.jsonl", b'{"text": "a\\ud800"}' + NEXT), "surrogate", documents=2),
    file("json lines: NUL", text("a.jsonl", b'{"text": "a\\u0000"}' + NEXT), "NUL", documents=2),
    file("json lines: a line of 80 MB",
         text("a.jsonl", lambda: b'{"text": "' + b"x" * (80 << 20) + b'"}' + NEXT), "larger than",
         documents=2),
    file("json lines: 20,000,000 lists",
         text("a.jsonl", lambda: b'{"text": "a", "m": [%s[]]}' % (b"[]," * 20_000_000) + NEXT),
         "objects and lists", documents=2),
    file("json: 8,000,000 objects",
         text("a.json", lambda: b"[" + b"{}," * 8_000_000 + b"{}]"), "objects and lists"),
    file("json: 40,000,000 numbers",
         text("a.json", lambda: b"[" + b"1.5," * 40_000_000 + b"1]"), TOO_MUCH),
)  # fmt: skip
TABLES = (
    file("csv: a cell of 1 MB", text("a.csv", "text\n" + "river " * 170_000), documents=2),
    file("csv: a quotation mark that is never closed",
         text("a.csv", lambda: b'text\ncopper\n"open\n' + b"more\n" * (14 << 20)),
         "close its quotation mark|the rest of the file", lines=2, documents=2,
         options="--parse-seconds 30"),  # it comes to the bound of a row, not to that of time
    file("csv: a row of 30,000,000 cells",
         text("a.csv", lambda: b"text\ncopper\n" + b"," * 30_000_000),
         "close its quotation mark|the rest of the file", lines=2, documents=2),
    file("csv: names of 30,000,000 columns", text("a.csv", lambda: b"," * 30_000_000),
         "close its quotation mark|the rest of the file", lines=2),
    file("csv: two columns of one name", text("a.csv", "text,text\na,b\n"), "two columns"),
    file("csv: NUL", text("a.csv", b"text\na\0b\n"), "NUL"),
)  # fmt: skip
TEXTS = (
    file("text: a line of 5 MB of words", text("a.txt", lambda: b"river " * 900_000), documents=2,
         options="--chunk-tokens 500 --overlap 0"),
    file("text: a line of 5 MB without a space", text("a.txt", lambda: b"x" * (5 << 20)),
         "without a space or line break"),
    file("text: 80 MB without a space", text("a.txt", lambda: b"x" * (80 << 20)),
         "without a space or line break"),
    file("text: 300 MB", lambda folder: os.truncate(_made(folder / "a.txt"), 300 << 20),
         "larger than 256 MiB"),
    file("text: a title of 1,000,000 marks", text("a.md", "# a" + " #" * 500_000 + " x\n\ncopper"),
         "title holds"),
    file("text: binary", text("a.txt", bytes(range(256)) * 99), "UTF-8|NUL"),
    file("text: white space", text("a.txt", lambda: b" " * 1_000_000), "white space"),
)  # fmt: skip


def _made(path: Path) -> Path:
    path.touch()
    return path


def _fifo(folder: Path) -> None:
    os.mkfifo(folder / "a.txt")


def _loop(folder: Path) -> None:
    (folder / "loop").symlink_to(folder)
    (folder / "self.txt").symlink_to("self.txt")


def _out(folder: Path) -> None:
    (folder / "passwd.txt").symlink_to("/etc/passwd")
    (folder / "etc").symlink_to("/etc")


def _many(folder: Path) -> None:
    for number in range(5_000):
        (folder / f"{number}.txt").write_text(" ")


IDS = b"".join(
    b'{"text": "river", "id": %s}\n' % json.dumps(one).encode()
    for one in ("../../etc/passwd", "a\nb", "'; DROP TABLE documents; --", "\u202eabc", "x" * 10**5)
)
FOLDERS = (
    file("names: a FIFO", _fifo, "not a regular file"),
    file("names: links in loops", _loop, "link to a folder|regular file", lines=2),
    file("names: links out of the folder", _out, "is a link", lines=2),
    file("names: 5,000 empty files", _many, "white space", lines=5_000),
    file("names: a newline and an escape",
         text("a\n\x1b[31m.txt", b"\xff"), r"a\\n\\x1b\[31m\.txt"),
    file("ids: paths, SQL, newlines, 100,000 letters", text("a.jsonl", IDS), documents=6),
    file("ids: one twice", text("a.jsonl", b'{"text": "a", "id": "good.txt"}'), "given before"),
    file("ids: 5,000 digits", text("a.jsonl", b'{"text": "a", "id": %s}' % (b"9" * 4000)),
         documents=2),
)  # fmt: skip


def ask(name: str, question: Callable[[], str], says: str = "", *options: str) -> Case:
    """A question to a knowledge base that is there; without ``says`` it is answered."""

    def make(folder: Path) -> list[str]:
        return ["ask", question(), "--kb", str(folder / "asked"), "--max-new-tokens", "2", *options]

    return Case(name, make, "refused" if says else "done", says, documents=0)


def where(name: str, condition: Any, says: str = "") -> Case:
    shown = condition if isinstance(condition, str) else json.dumps(condition)
    return ask(f"where: {name}", lambda: "river", says, "--where", shown)


QUESTIONS = (
    ask("question: 100,000 letters", lambda: "x" * 100_000, "tokens|positions|context"),
    ask("question: 20,000 words", lambda: "river " * 20_000, "tokens|positions|context"),
    ask("question: empty", lambda: "", "question|text"),
    ask("question: k of 10^9", lambda: "river", "", "--k", "1000000000"),
    ask("question: k of 2^63", lambda: "river", "", "--k", str(2**63)),
    ask("question: 10^9 new tokens", lambda: "river", "max_new_tokens|tokens",
        "--max-new-tokens", "1000000000"),
    ask("question: half of a surrogate pair", lambda: "river \udc80", "surrogate|UTF-8|question"),
    where("an unknown operator", {"year": {"$exec": 1}}, r"\$exec"),
    where("SQL in a name", {"year' OR 1=1 --": 5}),
    where("NaN", '{"year": NaN}', "where|JSON|finite"),
    where("10^30", {"year": {"$gte": 10**30}}, "where"),
    where("NUL", {"year": "a\u0000b"}, "where"),
    where("20,000 deep", '{"a":' * 20_000 + "1" + "}" * 20_000, "where"),
    where("10,000 values", {"year": {"$in": list(range(10_000))}}, "at most 1000"),
    where("600 fields", {f"f{n}": n for n in range(600)}, ""),
    where("a list", [1], "where"),
    where("$or", {"$or": [{"year": 1}]}),
)  # fmt: skip

CASES = (*DOCX, *PDF, *OFFICE, *HTML, *MARKUP, *JSON, *TABLES, *TEXTS, *FOLDERS, *QUESTIONS)
