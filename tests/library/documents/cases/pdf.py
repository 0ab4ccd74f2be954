"""PDF: forms, notes, tables, columns, lines that are cut, pictures, and text that is none."""

from functools import partial

from documents.cases import Case

WIDE = 612


def objects_of(page, first):
    """The objects of one page: itself, its lines and its annotations."""
    shown = "".join(
        f"/{font} {size} Tf 1 0 0 1 {x} {y} Tm {text} Tj\n"
        for x, y, text, font, size in page.get("lines", ())
    )
    picture = "q 500 0 0 700 50 50 cm /I Do Q\n" if page.get("picture") else ""
    notes = page.get("notes", ())
    refs = " ".join(f"{first + 2 + at} 0 R" for at in range(len(notes)))
    return [
        f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {WIDE} 792] /Annots [{refs}] /Resources << "
        "/Font << /F 3 0 R /G 4 0 R /S 5 0 R >> /XObject << /I 7 0 R >> >> "
        f"/Contents {first + 1} 0 R >>",
        stream(f"{picture}BT\n{shown}ET"),
        *notes,
    ]


def stream(text, more=""):
    return f"<< /Length {len(text)} {more} >>\nstream\n{text}\nendstream"


def pdf(path, pages, form=""):
    """A PDF of these pages, each {"lines", "picture", "notes"}; ``form`` joins its catalogue."""
    first = 9
    made, starts = [], []
    for page in pages:
        starts.append(first + len(made))
        made += objects_of(page, starts[-1])
    kids = " ".join(f"{start} 0 R" for start in starts)
    objects = [
        f"<< /Type /Catalog /Pages 2 0 R {form} >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /ABCDEF+Own /FirstChar 33 /LastChar 126 "
        f"/Widths [{'600 ' * 94}] /Encoding << /Differences [33 "
        f"{' '.join(f'/g{code}' for code in range(33, 127))}] >> >>",
        "<< /Type /Font /Subtype /Type0 /BaseFont /ABCDEF+Sub /Encoding /Identity-H "
        "/DescendantFonts [6 0 R] >>",
        "<< /Type /Font /Subtype /CIDFontType2 /BaseFont /ABCDEF+Sub /DW 600 "
        "/CIDSystemInfo << /Registry (Adobe) /Ordering (Identity) /Supplement 0 >> >>",
        stream("\0" * 3, "/Type /XObject /Subtype /Image /Width 1 /Height 1 /BitsPerComponent 8 "
               "/ColorSpace /DeviceRGB"),
        stream("0 g BT /F 11 Tf 2 4 Td (Drawn by hand) Tj ET", "/Type /XObject /Subtype /Form "
               "/BBox [0 0 200 20] /Resources << /Font << /F 3 0 R >> >>"),
        *made,
    ]  # fmt: skip
    out, places = b"%PDF-1.7\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n".encode("latin-1")
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    tail = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
    tail += f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(out)}\n%%EOF\n"
    path.write_bytes(out + tail.encode())


def lines(*texts, x=72, y=720, font="F", size=12, step=14):
    """Lines below one another."""
    return [(x, y - step * at, shown(text, font), font, size) for at, text in enumerate(texts)]


def shown(text, font="F"):
    if font == "S":  # ids of a font whose first letter is at 29 less
        return "<" + "".join(f"{ord(c) - 29:04X}" for c in text) + ">"
    return "(" + text.replace("(", "\\(").replace(")", "\\)") + ")"


def grid(rows, xs=(72, 200, 320, 440), y=700, size=10):
    """Rows of cells, of which the empty ones draw nothing."""
    return [
        (x, y - 16 * at, shown(cell), "F", size)
        for at, row in enumerate(rows)
        for x, cell in zip(xs, row, strict=False)
        if cell
    ]


def spaced(text, x=72, y=700, size=12, gap=11):
    """Every letter drawn alone, wide apart, with more between words."""
    return [(x + gap * at, y, shown(c), "F", size) for at, c in enumerate(text) if c != " "]


FORM = (
    "/AcroForm << /Fields [11 0 R 12 0 R 13 0 R] /NeedAppearances true /DA (/F 10 Tf 0 g) "
    "/DR << /Font << /F 3 0 R >> >> >>"
)


def field(name, value, y, kind="/Tx", more=""):
    return (
        f"<< /Type /Annot /Subtype /Widget /F 4 /FT {kind} /T ({name}) /V {value} "
        f"/Rect [150 {y} 400 {y + 16}] /DA (/F 10 Tf 0 g) {more} >>"
    )


def note(text, y, more=""):
    return (
        f"<< /Type /Annot /Subtype /FreeText /F 4 /Contents ({text}) /DA (/F 10 Tf 0 g) "
        f"/Rect [72 {y} 400 {y + 20}] {more} >>"
    )


FILLED = {
    "lines": lines("Name:", "Lake:", "Boat:", step=30),
    "notes": [
        field("name", "(Kim Berow)", 716),
        field("lake", "(Elmsee)", 686, "/Ch", "/Opt [(Elmsee) (Rhodo)] /Ff 131072"),
        field("boat", "(two oars)", 656),
    ],
}
SCAN = {"picture": True}
STAMP = lines("Downloaded from library.example on 3 May 2024", y=20, size=8)
LEFT = ("The first column tells of salt that", "was carried over the pass by mules,", "and of "
         "the men "
        "who led them in May.", "It goes on for a few more lines so", "that nobody takes it "
         "for a row.")  # fmt: skip
RIGHT = ("The second column tells of the lake", "whose water rose in the year of the", "flood and "
         "took the lower village.", "Only the chapel was left standing on", "its hill above "
         "the shore.")  # fmt: skip
PRICES = [("Boat", "May", "June", "July"), ("Canoe", "10", "", "14"), ("Raft", "", "21", ""),
          ("Ferry", "30", "31", "32")]  # fmt: skip

PLEASE_WAIT = lines(
    "Please wait...",
    "If this message is not eventually replaced by the proper contents of the document, your PDF",
    "viewer may not be able to display this type of document.",
)
WAITED = "Please wait at the landing stage until the ferryman has tied the rope."


def case(kind, name, *pages, form="", **what):
    return Case(kind, f"{name}.pdf", partial(pdf, pages=pages, form=form), **what)


CASES = [
    case("form", "form", FILLED, form=FORM, kept=("Name:", "Kim Berow", "Lake:", "Elmsee",
         "Boat:", "two oars")),
    case("form", "drawn-field", {"lines": lines("Name:"), "notes": [field("name", "(Bo)", 716,
         more="/AP << /N 8 0 R >>")]}, form="/AcroForm << /Fields [11 0 R] >>", kept=("Name: "
         "Drawn by hand",)),
    case("form", "several-lines", {"lines": lines("Remarks:"), "notes": [field("remarks",
         "(Salt is dear.\\nOats are cheap.)", 600, more="/Ff 4096 /MK << >>")]},
         form="/AcroForm << /Fields [11 0 R] /NeedAppearances true /DA (/F 10 Tf 0 g) " "/DR "
         "<< /Font << /F 3 0 R >> >> >>", kept=("Remarks:", "Salt is dear.", "Oats are cheap.")),
    case("annotation", "approved", {"lines": lines("Plan of the pier"),
         "notes": [note("Approved by Kim on 3 May", 600)]}, kept=("Plan of the pier",
         "Approved by Kim on 3 May")),
    case("annotation", "drawn-note", {"lines": lines("Plan of the pier"), "notes": [note("not "
         "this", 600, "/AP << /N 8 0 R >>")]}, kept=("Plan of the pier", "Drawn by hand"),
         invented=("not this",)),
    case("annotation", "between", {"lines": lines("Above the note", "Below the note",
         step=80), "notes": [note("Seen by Bo", 660)]}, kept=("Above the note", "Seen by Bo",
         "Below the note")),
    case("annotation", "comment", {"lines": lines("Plan of the pier"), "notes": [
         "<< /Type /Annot /Subtype /Text /Contents (Is it so?) /Rect [9 9 29 29] >>"]},
         kept=("Plan of the pier",), said=("1 comment (1)",)),
    case("pages without text", "lease", {"lines": lines("Lease of the mill")}, *[SCAN] * 9,
         kept=("Lease of the mill",), said=("9 pages with pictures and no text (2 to 10)",)),
    case("pages without text", "stamped", *[SCAN | {"lines": STAMP}] * 3, kept=("Downloaded "
         "from",), said=("3 pages with pictures and only",)),
    case("pages without text", "numbered", {"lines": lines("The mill was built in 1802 and "
         "burned down twice since.")}, *[SCAN | {"lines": lines(f"Page {at} of 9",
         y=20)} for at in range(2, 6)], kept=("built in 1802", "Page 2 of 9"), said=("4 pages "
         "with pictures and only",)),
    case("pages without text", "pure-scan", SCAN, SCAN, refused="no text layer on any page (2 "
         "pages"),
    case("garbage", "glyph-names", {"lines": lines("the salt wells are deep", font="G")},
         refused="do not say which letters"),
    case("garbage", "shifted-ids", {"lines": lines("THIS TIME WE SHIFT IT ALL", font="S")},
         refused="do not say which letters"),
    case("garbage", "one-page", {"lines": lines("A page that can be read.")},
         {"lines": lines("and one that cannot be read", font="S")}, kept=("A page that can be "
         "read.",), said=("1 page whose", "(2)")),
    case("garbage", "one-symbol", {"lines": [*lines("Nine of ten are read."), *lines("x",
         y=680, font="G")]}, kept=("Nine of ten are read.",)),
    case("placeholder", "xfa", {"lines": PLEASE_WAIT}, form="/AcroForm << /Fields [] /XFA [] "
         ">>", refused="Please wait"),
    case("placeholder", "no-form", {"lines": PLEASE_WAIT}, refused="Please wait"),
    case("placeholder", "ferry", {"lines": lines(WAITED)}, kept=(WAITED,)),
    case("hyphenation", "cut", {"lines": lines("All of the infor-", "mation is here.")},
         kept=("All of the information is here.",)),
    case("hyphenation", "years", {"lines": lines("It was open in 2019-", "2020 only, a well-",
         "known and well-known inn.")}, kept=("in 2019-2020 only, a well-known and well-known "
         "inn.",)),
    case("hyphenation", "dash", {"lines": lines("- salt", "- oats", "Prices rose -", "as "
         "ever.")}, kept=("- salt", "- oats", "Prices rose -", "as ever.")),
    case("columns", "two", {"lines": [at for pair in zip(lines(*LEFT), lines(*RIGHT, x=330),
         strict=True) for at in pair]}, kept=(" ".join(LEFT), " ".join(RIGHT))),
    case("columns", "under-a-title", {"lines": [*lines("A title that is above both of the "
         "columns and wide as the page is", y=750), *[at for pair in zip(lines(*LEFT),
         lines(*RIGHT, x=330), strict=True) for at in pair]]}, kept=("A title that",
         " ".join(LEFT), " ".join(RIGHT))),
    case("columns", "one-after-the-other", {"lines": [*lines(*LEFT), *lines(*RIGHT, x=330)]},
         kept=(" ".join(LEFT), " ".join(RIGHT))),
    case("spaced letters", "spaced", {"lines": spaced("SALT WELLS OF LUND")}, kept=("SALT "
         "WELLS OF LUND",)),
    case("spaced letters", "in-one-string", {"lines": lines("S A L T   W E L L S", "are "
         "deep.")}, kept=("SALT WELLS", "are deep.")),
    case("spaced letters", "wide", {"lines": spaced("THE SALT OF LUND", gap=16)},
         kept=("THE SALT OF LUND",)),
    case("spaced letters", "no-words", {"lines": lines("A B C D E F", "x y x y z x", "1 0 1 1 0 1",
         step=20)}, kept=("A B C D E F", "x y x y z x", "1 0 1 1 0 1")),
    case("spaced letters", "initials", {"lines": lines("J. S. Bach wrote a b c on it.")},
         kept=("J. S. Bach wrote a b c on it.",)),
    case("table", "prices", {"lines": grid(PRICES)}, kept=("Boat | May | June | July", "Canoe "
         "| 10 |  | 14", "Raft |  | 21 |", "Ferry | 30 | 31 | 32")),
    case("table", "below-a-line", {"lines": [*lines("Prices of boats, in crowns for a whole "
         "day:"), *grid(PRICES[1:])]}, kept=("a whole day:", "Canoe | 10 |  | 14", "Raft |  | "
         "21 |")),
    case("table", "by-columns", {"lines": sorted(grid(PRICES))}, kept=("Boat | May | June | "
         "July", "Canoe | 10 |  | 14")),
]  # fmt: skip
