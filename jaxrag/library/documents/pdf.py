"""Reader of .pdf: what a person sees on its pages, or which pages cannot be read and why."""

import collections
import ctypes
import itertools
import re
import statistics
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

from jaxrag.base.errors import DocumentError
from jaxrag.library.documents.blocks import Block, joined, one_spaced, row
from jaxrag.library.documents.document import BadDocument, Document
from jaxrag.library.documents.files import (
    BETWEEN_PAGES,
    File,
    join_pages,
    one_line,
    parsing,
    read_bytes,
    require_short,
)
from jaxrag.library.documents.left_out import left_out_of
from jaxrag.library.documents.marks import LOWERED, RAISED, marked

_FULL_LINE = 0.9  # of the longest line of its page
_FEW_CHARACTERS = 300  # of a page that may be a picture under a stamp
_MANY_DRAWINGS = 20  # on a page without text that is not an empty one
_COLUMN = 25  # characters of a line, on average, in a column of prose
_MARKER = re.compile(r"[•·*▪◦‣\u2013\u2014-]|\(?\w{1,3}[.)]|\[\w{1,5}\]")  # of an item
_WAIT = re.compile(r"Please wait\W+If this message is not eventually replaced")
_CUT = re.compile(r"\b(\w++)[-\u00ad\u2010]\n(\w+)")
_JOINED = re.compile(r"\b\w++(?:-\w++)+")
_CUTS = ("\x02", "\ufffe")  # what pdfium gives for a hyphen at the end of a line
_NUMBER = re.compile(r"\d+")
_SPACED = 4  # capitals one by one: as many may be no word


class _Word(NamedTuple):
    """Where a word or some stand, in points from the lower left, and how high their line is."""

    left: float
    right: float
    low: float
    high: float
    text: str


_Line = list[_Word]  # the words of which that stand apart from the others


def read_pdf(stream: BinaryIO, file: File) -> Iterator[Document | BadDocument]:
    """One document with its pages. A page that cannot be read is reported, the others are kept.

    Values of forms and notes stand where they are drawn; columns are read one after the other, and
    of tables each row is a line. Counted as left out are pages with pictures and no text of their
    own, and those whose text is none: fonts that do not say which letters they draw, replacement
    characters, the placeholder of a form that few programs show.

    Refused: a file that needs a password, one without any text (a scan), one of more than
    MAX_TEXT_CHARACTERS.
    """
    data = read_bytes(stream)
    with parsing("PDF"):
        pdf = _open(data)
        num_pages = len(pdf)
        title = one_spaced(_whole(pdf.get_metadata_value("Title")))
    texts: list[str] = []
    pictured: list[int] = []
    size = bad = 0
    for number in range(num_pages):
        text = ""
        try:
            text, has_picture = _page(pdf, number, file)
            pictured += [number] if has_picture else []
        except MemoryError:
            raise
        except Exception as error:
            yield file.bad(f"the page cannot be parsed ({one_line(error)})", f", page {number + 1}")
            bad += 1
        texts.append(text)
        size += len(text) + len(BETWEEN_PAGES)
        require_short(size)
    times = collections.Counter(_NUMBER.sub("#", text) for text in texts)
    for number in pictured:
        if not texts[number]:
            file.left_out.add("pages with pictures and no text", number + 1)
        elif times[_NUMBER.sub("#", texts[number])] > 1:
            what = "pages with pictures and only a text that other pages have"
            file.left_out.add(what, number + 1)
    body, pages = join_pages(_mended(texts))
    if body or not bad or bad < num_pages:
        found = "; ".join(left_out_of(file.left_out.metadata()))
        said = f" ({found})" if found else ""
        empty = f"no text layer on any page{said}; run text recognition (OCR) on it first"
        title = "" if title.lower() == "untitled" else title  # what programs write for none
        yield file.document(body, title, pages=pages, empty=empty)


def _open(data: bytes) -> Any:
    import pypdfium2  # only who reads PDF waits for it

    try:
        pdf = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        if error.err_code == pypdfium2.raw.FPDF_ERR_PASSWORD:
            raise DocumentError("is encrypted; save a copy of it without a password") from None
        raise
    if pdf.get_formtype() == pypdfium2.raw.FORMTYPE_ACRO_FORM:
        pdf.init_forms()  # draws the values of fields
    return pdf


def _page(pdf: Any, number: int, file: File) -> tuple[str, bool]:
    """The text of a page, and whether it holds a picture and hardly a text."""
    from pypdfium2 import raw

    page = pdf[number]
    notes = list(_notes(page, number, file))
    raw.FPDFPage_Flatten(page.raw, raw.FLAT_NORMALDISPLAY)
    page.close()
    page = pdf[number]
    textpage = page.get_textpage()
    words, unnamed = _words(textpage, page.get_rotation())
    text = _clean(joined(_blocks([_parted(line) for line in _lines(words + notes)])))
    letters = [c for c in text if not c.isspace()]
    odd = sum(c == "\ufffd" or unicodedata.category(c) in ("Co", "Cn", "Cc") for c in letters)
    if 2 * unnamed > len(letters):
        text = _none("pages whose fonts do not say which letters they draw", number, file)
    elif 3 * odd > len(letters):
        text = _none("pages of replacement characters", number, file)
    elif _WAIT.match(text):
        text = _none('pages of "Please wait..." alone', number, file)
    elif len(text) <= _FEW_CHARACTERS:
        images = page.get_objects(filter=[raw.FPDF_PAGEOBJ_IMAGE], max_depth=3)
        many = raw.FPDFPage_CountObjects(page.raw) > _MANY_DRAWINGS
        return text, any(True for _ in images) or (many and not text)
    return text, False


def _none(what: str, number: int, file: File) -> str:
    file.left_out.add(what, number + 1)
    return ""


def _notes(page: Any, number: int, file: File) -> Iterator[_Word]:
    """What is written on a page in boxes of which the file does not say how they are drawn."""
    from pypdfium2 import raw

    for index in range(raw.FPDFPage_GetAnnotCount(page.raw)):
        note = raw.FPDFPage_GetAnnot(page.raw, index)
        drawn = raw.FPDFAnnot_GetAP(note, raw.FPDF_ANNOT_APPEARANCEMODE_NORMAL, None, 0) > 2
        kind = raw.FPDFAnnot_GetSubtype(note)
        file.left_out.add("comments", number + 1, kind == raw.FPDF_ANNOT_TEXT)
        if kind == raw.FPDF_ANNOT_FREETEXT and not drawn:
            size = raw.FPDFAnnot_GetStringValue(note, b"Contents", None, 0)
            buffer = (ctypes.c_ushort * (size // 2 + 1))()
            raw.FPDFAnnot_GetStringValue(note, b"Contents", buffer, size)
            text = _whole(bytes(buffer)[: max(size - 2, 0)].decode("utf-16-le", "surrogatepass"))
            box = raw.FS_RECTF()
            raw.FPDFAnnot_GetRect(note, box)
            if text.strip():
                yield _Word(box.left, box.right, box.bottom, box.top, one_spaced(text))
        raw.FPDFPage_CloseAnnot(note)


def _words(textpage: Any, rotation: int) -> tuple[list[_Word], int]:
    """The words of a page as it is turned, and how many of its letters are guesses."""
    from pypdfium2 import raw

    words: list[_Word] = []
    runs: list[tuple[str, str]] = []
    box, x, y = raw.FS_RECTF(), ctypes.c_double(), ctypes.c_double()
    place: list[float] = []  # of the word under way
    base = height = 0.0  # where its letters stand, and how high they are
    unnamed = 0
    apart = True

    def end() -> None:
        if runs:
            words.append(_Word(*_turned(place, rotation), marked(runs)))
            runs.clear()

    for index in range(textpage.count_chars()):
        c = chr(raw.FPDFText_GetUnicode(textpage.raw, index))
        if c.isspace() or c == "\0":
            apart = True
            continue
        raw.FPDFText_GetLooseCharBox(textpage.raw, index, box)
        raw.FPDFText_GetCharOrigin(textpage.raw, index, x, y)
        unnamed += raw.FPDFText_HasUnicodeMapError(textpage.raw, index) == 1
        mark, high = "", box.top - box.bottom
        if runs and high < 0.85 * height and box.left - place[1] < 0.2 * height:
            rise = (y.value - base) / height
            mark = RAISED if 0.15 < rise < 1 else LOWERED if -0.6 < rise < -0.08 else ""
        if apart and not mark:
            end()
        if not runs:
            place = [box.left, box.right, box.bottom, box.top]
        place[:2] = min(place[0], box.left), max(place[1], box.right)
        if not mark:
            base, height = y.value, max(high, 0.1)
            place[2:] = min(place[2], box.bottom), max(place[3], box.top)
        apart = c in _CUTS
        runs.append(("-" if apart else c, mark))
    end()
    return words, unnamed


def _turned(place: Sequence[float], rotation: int) -> tuple[float, float, float, float]:
    """Left, right, low, high on a page that is shown turned to the right."""
    left, right, low, high = place
    for _ in range(rotation // 90):
        left, right, low, high = low, high, -right, -left
    return left, right, low, high


def _lines(words: Sequence[_Word]) -> Iterator[list[_Word]]:
    """The words of each line from left to right, from the top of the page."""
    line: list[_Word] = []
    for word in sorted(words, key=lambda box: -(box.low + box.high)):
        if line:
            shared = min(word.high, line[0].high) - max(word.low, line[0].low)
            if shared < 0.5 * min(box.high - box.low for box in (word, line[0])):
                yield sorted(line)
                line = []
        line.append(word)
    if line:
        yield sorted(line)


def _parted(line: Sequence[_Word]) -> _Line:
    """The parts of a line that stand apart; letters that are spaced wide are words again."""
    gaps = [after.left - before.right for before, after in itertools.pairwise(line)]
    height = max(word.high - word.low for word in line)
    least = 0.0  # of a gap between words
    letters = "".join(word.text for word in line)
    spaced = len(line) > _SPACED and letters.isupper() and len(letters) < 1.3 * len(line)
    if spaced and list(letters) != sorted(letters):  # as A B C D are
        usual = statistics.median(gaps)
        least = 1.6 * usual + 0.25 * height if usual < 0.9 * height else 0.0
    kinds = [unicodedata.bidirectional(word.text[0]) for word in line]
    right_to_left = kinds.count("R") + kinds.count("AL") > len(line) / 2
    cells: _Line = []
    for word, gap in zip(line, [0.0, *gaps], strict=True):
        cell = cells[-1] if cells else None
        item = len(cells) == 1 and cell is not None and _MARKER.fullmatch(cell.text)
        if cell is None or (gap > height and not least and not item):
            cells.append(word)
            continue
        space = "" if gap < least else " "
        both = (word.text, cell.text) if right_to_left else (cell.text, word.text)
        cells[-1] = cell._replace(right=max(cell.right, word.right), text=space.join(both))
    return cells


def _blocks(lines: Sequence[_Line]) -> Iterator[Block]:
    """What stands on these lines: paragraphs, tables, columns."""
    run: list[_Line] = []
    spans: list[tuple[float, float]] = []  # that hold text, with room between them
    for line in lines:
        both = _together([*spans, *((cell.left, cell.right) for cell in line)])
        if run and len(both) < (len(spans) if len(spans) > 1 else len(line)):
            yield from _run(run, spans)
            run, both = [], [(cell.left, cell.right) for cell in line]
        run.append(line)
        spans = both
    yield from _run(run, spans)


def _together(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for left, right in sorted(spans):
        if found and left < found[-1][1] + 2:
            found[-1] = found[-1][0], max(found[-1][1], right)
        else:
            found.append((left, right))
    return found


def _run(lines: Sequence[_Line], spans: Sequence[tuple[float, float]]) -> Iterator[Block]:
    """Lines that keep the same room between them."""
    columns = [
        [kept for line in lines if (kept := [w for w in line if left <= w.left <= right])]
        for left, right in spans
    ]
    sizes = [(sum(len(w.text) for line in column for w in line), column) for column in columns]
    long = [column for size, column in sizes if len(column) > 2 and size > _COLUMN * len(column)]
    if len(spans) > 1 and len(long) > 1:
        for column in columns:
            yield from _blocks(column)
    elif len(spans) > 1 and sum(len(line) > 1 for line in lines) > 1:
        for line in lines:
            kind, text = row(
                " ".join(w.text for w in line if left <= w.left <= right) for left, right in spans
            )
            yield kind, text.replace(": | ", ": ")
    else:
        yield "", "\n".join(" ".join(w.text for w in line) for line in lines)


def _mended(texts: Sequence[str]) -> list[str]:
    """Pages whose words that are cut at the end of a line are whole.

    A hyphen stays between numbers, and where the same word has it elsewhere.
    """
    words = itertools.chain.from_iterable(map(_JOINED.findall, texts))
    kept = {pair for word in words for pair in itertools.pairwise(word.split("-"))}

    def mended(match: re.Match[str]) -> str:
        before, after = match[1], match[2]
        if (before[-1] + after[0]).isdigit() or (before, after) in kept:
            return f"{before}-{after}"
        whole_word = (before[-1] + after[0]).islower() or (before + after).isupper()
        return before + after if whole_word else match[0]

    return [_CUT.sub(mended, text) for text in texts]


def _whole(text: str) -> str:
    """Without NULs and halves of surrogate pairs, as broken fonts leave them."""
    whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return whole.replace("\0", "")


def _clean(text: str) -> str:
    """Scripts without spaces wrap inside of words: a full line there goes on with the next one."""
    lines = [line.rstrip() for line in _whole(text).splitlines()]
    full = _FULL_LINE * max(map(len, lines), default=0)
    out = ""
    for line, following in itertools.zip_longest(lines, lines[1:], fillvalue=""):
        wraps = len(line) >= full and _is_wide(line[-1:]) and _is_wide(following[:1])
        out += line if wraps else line + "\n"
    return out.strip()


def _is_wide(character: str) -> bool:
    """Whether it belongs to a script of wide characters, such as Chinese; not for ''."""
    return character != "" and unicodedata.east_asian_width(character) == "W"
