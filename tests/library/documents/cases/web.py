"""Web pages, books and markup: what is drawn, and in which row, number and encoding."""

import zipfile
from functools import partial

from documents.cases import Case

HIDDEN = '<script>var no = "<p>no script</p>"</script><p style="display:none">not shown</p>'


def write(path, text, encoding="utf-8"):
    path.write_bytes(text if isinstance(text, bytes) else text.encode(encoding))


def page(kind, name, body, head="", encoding="utf-8", **what):
    text = body
    if isinstance(body, str):
        text = f"<html><head>{head}</head><body>{body}</body></html>"
    return Case(kind, f"{name}.html", partial(write, text=text, encoding=encoding), **what)


def markup(kind, name, text, **what):
    return Case(kind, name, partial(write, text=text), **what)


def write_epub(path, body):
    """A book of one chapter."""
    with zipfile.ZipFile(path, "w") as book:
        book.writestr("mimetype", "application/epub+zip")
        book.writestr("META-INF/container.xml", CONTAINER)
        book.writestr("book.opf", PACKAGE)
        book.writestr("one.xhtml", body if isinstance(body, bytes) else XHTML.format(body))


CONTAINER = (
    '<container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
    '<rootfile full-path="book.opf" media-type="application/oebps-package+xml"/></rootfiles>'
    "</container>"
)
PACKAGE = (
    '<package xmlns="http://www.idpf.org/2007/opf" version="3.0" unique-identifier="i"><metadata '
    'xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>Wells</dc:title><dc:language>en'
    '</dc:language><dc:identifier id="i">x</dc:identifier></metadata><manifest>'
    '<item id="a" href="one.xhtml" media-type="application/xhtml+xml"/></manifest>'
    '<spine><itemref idref="a"/></spine></package>'
)
XHTML = (
    '<?xml version="1.0" encoding="utf-8"?><html xmlns="http://www.w3.org/1999/xhtml" '
    'xmlns:epub="http://www.idpf.org/2007/ops"><head><title>One</title></head>'
    "<body>{}</body></html>"
)
MATH = '<math xmlns="http://www.w3.org/1998/Math/MathML">{}</math>'
HALF = MATH.format("<mfrac><mn>1</mn><mn>2</mn></mfrac>")
NOTE = '45<sup><a href="#n1" id="r1">1</a></sup> million'
ROWS = '<tr><th>Region</th><th>Product</th><th>Units</th></tr><tr><td rowspan="2">Europe</td>' \
    "<td>Cable</td><td>12</td></tr><tr><td>Hub</td><td>7</td></tr>"  # fmt: skip
FERRY = "<p>The ferry to Lund leaves at 9:40, and the last one returns at 21:15.</p>"
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="90"><style>text { fill: red }</style>' \
    "<text>Output: 42 MW</text></svg>"  # fmt: skip

CASES = [
    page("raised and lowered", "powers", "<p>10<sup>6</sup> litres on 25 m<sup>2</sup>, 2<sup>53"
         "</sup> is large, H<sub>2</sub>O, log<sub>2</sub>8.</p>",
         kept=("10^6 litres", "25 m^2", "2^53 is", "H_2O"), invented=("106", "253", "28.")),
    page("raised and lowered", "footnote", f"<p>It was {NOTE}, or 12<sup>[2]</sup> each.</p>",
         kept=("45 [1] million", "12 [2] each"), invented=("451", "122")),
    page("raised and lowered", "several-notes", "<p>It was 45<sup><a "
         "href=#a><i>[</i>1<i>]</i></a></sup>"
         "<sup><a href=#a>2</a>,<a href=#b>3</a></sup> million.</p>",
         kept=("45 [1] [2,3] million",)),
    page("raised and lowered", "drawn-twice", '<p>For <span class="katex"><span '
         'class="katex-mathml">'
         + MATH.format("<msup><mi>x</mi><mn>2</mn></msup>") + '</span><span class="katex-html" '
         'aria-hidden="true">x2</span></span> tons.</p>', kept=("For x^2 tons.",)),
    page("raised and lowered", "fractions", f"<p>Take {HALF} cup, 1 <sup>3</sup>/<sub>4</sub> "
         f"spoons"
         " on the 1<sup>st</sup> day.</p>",
         kept=("1/2 cup", "1 3/4 spoons", "1st day"), invented=("12 cup", "34 spoons")),
    page("raised and lowered", "formula",
         "<p>" + MATH.format("<msup><mi>r</mi><mrow><mi>n</mi><mo>+"
         "</mo><mn>1</mn></mrow></msup>") + " and <a href=x>10<sup>9</sup> tons</a>.</p>",
         kept=("r^(n+1)", "10^9 tons"), invented=("109",)),
    page("struck out", "price", "<p>It costs <del>$100</del> $80.</p>", kept=("~~$100~~ $80",)),
    Case("raised and lowered", "powers.epub", partial(write_epub, body="<p>10<sup>6</sup> litres, "
         f"{HALF} cup, {NOTE}.</p>"), kept=("10^6 litres", "1/2 cup", "45 [1] million"),
         invented=("106", "12 cup", "451")),
    Case("footnotes of a book", "notes.epub", partial(write_epub, body="<p>Salt was "
         "dear.</p><aside "
         'epub:type="footnote"><p>In 1802 above all.</p></aside>'),
         kept=("Salt was dear.", "In 1802 above all.")),
    Case("pictures of a book", "drawn.epub", partial(write_epub, body=f'<img src="a.png" '
         f'alt="A mule '
         f'on the pass"/>{SVG}'), kept=("A mule on the pass", "Output: 42 MW")),
    markup("raised and lowered", "powers.rst", "Tank\n====\n\nIt holds 10\\ :sup:`6` litres of "
           "H\\ :sub:`2`\\ O.\n", kept=("10^6 litres of H_2O",), invented=("106",)),
    markup("raised and lowered", "powers.org", "* Tank\nIt holds 10^{6} litres of H_{2}O.\n",
           kept=("10^", "6", "litres"), invented=("106",)),
    markup("numbers of items", "clauses.rst", "5. Rent is due.\n6. A late fee applies.\n\nClause 6 "
           "rests.\n", kept=("5. Rent is due.", "6. A late fee applies.", "Clause 6 rests.")),
    markup("numbers of items", "clauses.org", "* Lease\n1. Rent is due.\n2) A fee.\n- else\n",
           kept=("1. Rent is due.", "2) A fee.", "- else")),
    markup("tables", "spans.rst", "+-------+------+------+\n| Name  | 2023 | 2024 "
         "|\n+=======+======+"
           "======+\n| Cable | 1    | 2    |\n|       +------+------+\n|       | 3    |      |\n"
           "+-------+------+------+\n", kept=("Name | 2023 | 2024",
           "Name: Cable | 2023: 1 | 2024: 2", "Name: Cable | 2023: 3")),
    page("headings in buttons", "accordion", "<h2><button>Can I return a "
         "kettle?</button></h2><p>Yes,"
         " within 30 days.</p><h3><span><button aria-expanded=false>A "
         "mattress?</button></span></h3>"
         "<p>No.</p>", kept=("Can I return a kettle?", "30 days", "A mattress?", "No.")),
    page("headings in buttons", "tabs", "<div role=tablist><button role=tab>Linux</button><button "
         "role=tab aria-controls=w>Windows</button></div><div role=tabpanel>apt install heron</div>"
         '<div id=w hidden>winget install heron</div><button type="submit">Buy now</button>',
         kept=("Linux", "Windows", "apt install heron", "winget install heron"),
         invented=("Buy now", "LinuxWindows")),
    page("headings in buttons", "summary", "<details><summary>A lamp?</summary>Only "
         "unopened.</details>"
         '<dl><dt><button>Opening hours</button></dt><dd>9 to 5</dd></dl>',
         kept=("A lamp?", "Only unopened.", "Opening hours", "9 to 5")),
    page("a part for the page", "teaser",
         f"<div><h1>Ferry</h1>{FERRY}</div><div><article><h3>Win a "
         "bicycle</h3></article></div>", kept=("Ferry", "9:40", "21:15", "Win a bicycle")),
    page("a part for the page", "review", f"<h1>Hotel Elm</h1><p>Rooms from 70.</p>{FERRY}<article>"
         "Very nice.</article>", kept=("Hotel Elm", "Rooms from 70.", "Very nice.")),
    page("a part for the page", "two-mains", f"<nav>Home</nav><main>{FERRY}</main><div "
         f"role=main><p>"
         "Second part.</p></div>", kept=("9:40", "Second part."), invented=("Home",)),
    page("a part for the page", "little", f"<div>{FERRY * 9}</div><main><p>Loading</p></main>",
         kept=("Loading",), said=("1 % kept",)),
    page("what is drawn", "parts", '<main><p>Open it.</p><aside class="warning">Danger: never open '
         "the valve.</aside><blockquote>Know "
         "thyself.<footer>Thales</footer></blockquote><figure><img "
         'src=a.png alt="Valve A feeds tank B"><figcaption>Figure 1</figcaption></figure></main>',
         kept=("Open it.", "Danger: never open", "Know thyself.", "Thales", "Valve A feeds",
         "Figure")),
    page("what is drawn", "form", '<form><label>Model</label><input value="HX-200"><input '
         'type=hidden '
         "value=token><select><option>Iron<option selected>Bronze</select><textarea>Serial 7731"
         "</textarea><input type=checkbox checked> Insured</form>",
         kept=("Model HX-200", "Bronze", "Serial 7731", "[x] Insured"), invented=("token", "Iron")),
    page("what is drawn", "drawing", f"<p>Plant</p>{SVG}<p>End</p>",
         kept=("Plant", "Output: 42 MW", "End"), invented=("fill: red",)),
    page("what is drawn", "shadow", '<h1>Dam</h1><my-card><template '
         'shadowrootmode="open"><p>80 metres'
         f"</p></template></my-card><template><p>not yet</p></template>{HIDDEN}<p>Closed.</p>",
         kept=("Dam", "80 metres", "Closed."), invented=("not yet", "no script", "not shown")),
    page("what is drawn", "alt-inside", "<p>Price: <img src=e.png alt='€'> 5 a "
         "day</p><p>Oats</p><article><p>Text"
         "</p><footer>Source: the mill's books</footer></article>",
         kept=("Price: € 5 a day", "Source: the mill's books")),
    page("tables", "spans",
         f"<table>{ROWS}<tr><td>Asia<td>Cable<td>3</table><table><tr><th></th><th "
         "colspan=2>2023</th><th colspan=2>2024</th></tr><tr><th>Cable<td>1<td><td>3<td>4</table>",
         kept=("Region | Product | Units", "Region: Europe | Product: Cable | Units: 12",
               "Region: Europe | Product: Hub | Units: 7", "Region: Asia | Product: Cable",
               "2023 | 2023 | 2024 | 2024", "Cable | 2023: 1 | 2024: 3 | 2024: 4")),
    page("tables", "paragraphs",
         "<table><tr><th><p>Server</p></th><th><p>Port</p></th></tr><tr><td><p>"
         "alpha</p></td><td><div>8080</div></td></tr><tr><td><ul><li>beta</li><li>gamma</li></ul>"
         "</td>"
         "<td><p></p></td></tr></table>",
         kept=("Server | Port", "Server: alpha | Port: 8080", "beta gamma")),
    page("tables", "nested", "<table><tr><td>Line one<br>line "
         "two</td><td>5</td></tr><tr><td>of <table>"
         "<tr><td>in</td><td>side</td></tr></table></td><td>6</td></tr></table>",
         kept=("Line one line two | 5", "of in side | 6")),
    page("tables", "wide-row", "<table><caption>Boats</caption><tr><td colspan=3>Prices of "
         "May</td></tr>"
         "<tr><td>Raft<td>21<td>22<tr><td>Canoe<td rowspan=2 colspan=2>free<tr><td>Ferry</table>",
         kept=("Boats", "Prices of May", "Raft | 21 | 22", "Canoe | free", "Ferry | free"),
         invented=("Prices of May |",)),
    page("tables", "long-cell", f"<table><tr><th>Boat<th>Story<tr><td>Raft<td>{FERRY * 40}</table>",
         kept=("Boat | Story", "Boat: Raft | Story: The ferry")),
    page("tables", "layout", f"<table><tr><td>{FERRY * 40}<td><p>Menu</table>", kept=("15. Menu",),
         invented=("|",)),
    page("numbers of items", "clauses", '<ol start="5"><li>Rent<li>Fee</ol><ol '
         'type=a><li>one<li>two</ol>'
         "<ol reversed><li>last<li>least</ol><ol><li>first<li "
         "value=7>seventh<li>eighth</ol><ul><li>bullet</ul>",
         kept=("5. Rent", "6. Fee", "a. one", "b. two", "2. last", "1. least", "1. first", "7. "
         "seventh", "8. eighth", "- bullet")),
    page("encoding", "one-bad-byte", "<p>Café. Grüezi.</p>".encode() + b"<p>bad \xe9 here</p>",
         kept=("Café. Grüezi.", "bad \ufffd here"), said=("1 byte not in UTF-8",)),
    page("encoding", "undefined-byte", "<p>François: 5 € \x81 end.</p>".encode("cp1252", "replace")
         .replace(b"?", b"\x81"), head="", kept=("François: 5 €", "end."), said=("read as "
         "cp1252",)),
    page("encoding", "lie-latin", "<p>Naïve façade: 5 €.</p>", head='<meta charset="iso-8859-1">',
         kept=("Naïve façade: 5 €.",)),
    page("encoding", "lie-japanese", "<p>日本の塩。</p>", head='<meta charset="shift_jis">',
         kept=("日本の塩。",)),
    page("encoding", "unknown-name", "<p>Grüße</p>", head='<meta charset="klingon">',
         kept=("Grüße",)),
    page("encoding", "undeclared", "<p>François lives here.</p>", encoding="latin-1",
         kept=("François lives here.",), said=("read as cp1252",)),
    page("encoding", "declared", "<p>Łódź leży</p>", head='<meta charset="iso-8859-2">',
         encoding="iso-8859-2", kept=("Łódź leży",)),
]  # fmt: skip
