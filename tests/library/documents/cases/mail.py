"""Messages: several texts, one that stands for another, forwarded ones, charsets."""

from functools import partial

from documents.cases import Case
from documents.cases.web import write

HEAD = (
    "From: Ann <ann@example.org>\nTo: Bob <bob@example.org>\nSubject: {}\n"
    "Date: Mon, 1 Jul 2024 10:00:00 +0200\nMIME-Version: 1.0\n"
)


def part(text, kind="text/plain; charset=utf-8", more=""):
    return f"Content-Type: {kind}\n{more}\n{text}\n"


def parts(kind, *some):
    """A part of several; their boundaries differ by depth."""
    line = f"b{sum(map(len, some))}"
    inner = "".join(f"--{line}\n{it}" for it in some)
    return f'Content-Type: multipart/{kind}; boundary="{line}"\n\n{inner}--{line}--\n'


def mail(kind, name, body, encoding="utf-8", **what):
    text = (HEAD.format(name) + body).encode(encoding)
    return Case(kind, f"{name}.eml", partial(write, text=text), **what)


PICTURE = part("iVBORw0KGgo=", "image/png; name=a.png",
               "Content-Disposition: inline; filename=a.png\nContent-Transfer-Encoding: "
         "base64\n")  # fmt: skip
ORDER = (
    "From: Cy <cy@example.org>\nSubject: the chairs\nContent-Type: text/plain\n\nI order 40 "
    "chairs.\n"
)
HTML = "text/html; charset=utf-8"
RENT = "<p>Hello,</p><p>the rent for the lower mill is 700 crowns from May on.</p>"
PLAIN = "Dear Bob, the rent is due. " + "It was agreed on the pier in spring, as ever. " * 8

CASES = [
    mail("alternatives", "blank", parts("alternative", part(" "), part("<p>On 5 August.</p>",
         HTML)),
         kept=("On 5 August.",)),
    mail("alternatives", "stub", parts("alternative", part("Your mail program does not show HTML."),
         part("<p>Your booking code is HERON7.</p>", HTML)),
         kept=("HERON7",), invented=("does not show",)),
    mail("alternatives", "shortened", parts("alternative", part("Hello,"), part(RENT, HTML)),
         kept=("Hello,", "700 crowns")),
    mail("alternatives", "page-is-stub", parts("alternative", part(PLAIN),
         part("<p>View this message in a browser.</p>", HTML)),
         kept=("Dear Bob, the rent",), invented=("browser",)),
    mail("alternatives", "both", parts("alternative", part("The boat is blue, and long."),
         part("<p>Our house has nine red windows and a door.</p>", HTML)),
         kept=("nine red windows",), said=("1 text beside another",)),
    mail("several texts", "apple", parts("mixed", part("See this picture."), PICTURE,
         part("The meeting moved to room 12.")), kept=("See this", "room 12."),
         said=("1 attachment (a.png)",)),
    mail("several texts", "apple-pages", parts("alternative", part("First half."), parts("mixed",
         part("<p>First half.</p>", HTML), PICTURE, part(RENT, HTML))),
         kept=("First half.", "700 crowns"), said=("1 attachment (a.png)",)),
    mail("several texts", "footer", parts("mixed", parts("alternative", part("We meet at 9."),
         part("<b>We meet at 9.</b>", HTML)), part("Sent by the list of the mill.")),
         kept=("We meet at 9.", "Sent by the list"), invented=("9. We meet",)),
    mail("forwarded", "forward", parts("mixed", part("Please see below."), part(ORDER,
         "message/rfc822")), kept=("Please see below.", "Cy", "the chairs", "I order 40 chairs.")),
    mail("forwarded", "digest", parts("digest", part(ORDER, "message/rfc822"), part(ORDER.replace(
         "40", "7"), "message/rfc822")), kept=("order 40 chairs", "order 7 chairs")),
    mail("forwarded", "twice", parts("mixed", part("See."),
         part(HEAD.format("inner") + parts("mixed",
         part("Inside."), part(ORDER, "message/rfc822")), "message/rfc822")),
         kept=("See.", "inner", "Inside.", "I order 40 chairs.")),
    mail("charset", "unknown", part("Code 4711. Grüße", "text/plain; charset=x-unknown"),
         encoding="latin-1", kept=("Code 4711. Grüße",), said=("read as cp1252",)),
    mail("charset", "visual", part("שלום וברכה", "text/plain; charset=iso-8859-8-i"),
         encoding="iso-8859-8", kept=("שלום וברכה",)),
    mail("charset", "none", part("Grüße aus Köln.", "text/plain", "Content-Transfer-Encoding: "
         "8bit\n"),
         kept=("Grüße aus Köln.",)),
    mail("charset", "of-the-page", part('<meta charset="iso-8859-2"><p>Łódź leży daleko</p>',
         "text/html"), encoding="iso-8859-2", kept=("Łódź leży daleko",)),
    mail("charset", "latin", part("“5 €” für François, alles gut", "text/plain; "
         "charset=iso-8859-1"),
         encoding="cp1252", kept=("“5 €” für François",)),
]  # fmt: skip
