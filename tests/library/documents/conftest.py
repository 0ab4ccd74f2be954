"""Small real files, made by code."""

import io

import docx
import pytest

from jaxrag.library.documents import BadDocument, Document, read_paths
from jaxrag.library.documents.parser import Parsed, ParseLimits, Parser
from jaxrag.library.documents.readers import read_open


class Here(Parser):
    """Reads in the process of the test, where readers can be watched and bounds be changed."""

    def __init__(self):
        super().__init__(ParseLimits())

    def parse(self, path, filename, name, options, reported=None, **_):
        with open(path, "rb") as stream:
            for found in read_open(stream, filename, name, options, reported):
                yield found if isinstance(found, BadDocument) else Parsed(found, ())


@pytest.fixture(scope="session")
def read_here():
    """``read_here(paths, wanted=..., **options)``: as ``read_paths``, parsed in this process."""

    def call(paths, wanted=lambda name: True, **options):
        return read_paths(paths, **options).only(wanted).read_with(Here())

    return call


@pytest.fixture(scope="session")
def make_pdf():
    """``make_pdf(pages, title="", font=True)``: bytes of a PDF whose pages hold these lines."""
    return pdf


@pytest.fixture(scope="session")
def make_docx():
    """``make_docx(fill)``: bytes of a DOCX that ``fill`` wrote into a python-docx document."""

    def make(fill):
        document = docx.Document()
        fill(document)
        out = io.BytesIO()
        document.save(out)
        return out.getvalue()

    return make


class Read:
    """``read(*paths, **options)``: the good documents and the bad ones, in their order."""

    def __init__(self, here):
        self._here = here

    def __call__(self, *paths, **options):
        found = list(self._here(paths, **options))
        good = [item for item in found if isinstance(item, Document)]
        bad = [item for item in found if isinstance(item, BadDocument)]
        return good, bad

    def only(self, *paths, **options):
        """The one document; nothing is left out."""
        [document], bad = self(*paths, **options)
        assert bad == []
        return document

    def refused(self, *paths, **options):
        """Why the one document is left out."""
        good, [bad] = self(*paths, **options)
        assert good == []
        return bad.reason


@pytest.fixture
def read(read_here):
    return Read(read_here)


def pdf(pages, title="", encrypt=False):
    """A PDF with a two-byte font and the map from its codes to Unicode, as word processors write.

    ``encrypt`` adds an encryption dictionary whose password nobody knows.
    """
    characters = sorted({c for page in pages for c in page if c != "\n"})
    codes = {c: index + 1 for index, c in enumerate(characters)}
    chars = "\n".join(f"<{codes[c]:04X}> <{c.encode('utf-16-be').hex()}>" for c in characters)
    cmap = (
        "/CIDInit /ProcSet findresource begin 12 dict begin begincmap\n"
        "/CMapName /X def /CMapType 2 def\n"
        "1 begincodespacerange <0000> <FFFF> endcodespacerange\n"
        f"{len(characters)} beginbfchar\n{chars}\nendbfchar\n"
        "endcmap CMapName currentdict /CMap defineresource pop end end"
    )
    first_page = 7
    kids = " ".join(f"{first_page + 2 * n} 0 R" for n in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type0 /BaseFont /Any /Encoding /Identity-H "
        "/DescendantFonts [4 0 R] /ToUnicode 5 0 R >>",
        "<< /Type /Font /Subtype /CIDFontType2 /BaseFont /Any /DW 600 "
        "/CIDSystemInfo << /Registry (Adobe) /Ordering (Identity) /Supplement 0 >> >>",
        stream(cmap),
        f"<< /Title ({title}) >>",
    ]
    for number, page in enumerate(pages):
        lines = page.split("\n") if page else []
        shown = "".join(
            f"1 0 0 1 72 {760 - 14 * at} Tm <{''.join(f'{codes[c]:04X}' for c in line)}> Tj\n"
            for at, line in enumerate(lines)
        )
        objects.append(
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] "
            f"/Resources << /Font << /F 3 0 R >> >> /Contents {first_page + 2 * number + 1} 0 R >>"
        )
        objects.append(stream(f"BT /F 12 Tf\n{shown}ET"))
    trailer = "/Root 1 0 R /Info 6 0 R"
    if encrypt:
        objects.append(f"<< /Filter /Standard /V 1 /R 2 /O <{'11' * 32}> /U <{'22' * 32}> /P -4 >>")
        trailer += f" /Encrypt {len(objects)} 0 R /ID [<{'00' * 16}> <{'00' * 16}>]"
    out = b"%PDF-1.7\n"
    places = []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n".encode("latin-1")
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    tail = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
    tail += f"trailer\n<< /Size {len(objects) + 1} {trailer} >>\nstartxref\n{len(out)}\n%%EOF\n"
    return out + tail.encode()


def stream(text):
    return f"<< /Length {len(text)} >>\nstream\n{text}\nendstream"
