"""Values of a spreadsheet as its number formats show them.

A format has up to four sections: for numbers above zero, below it, zero, and text. What a format
leaves to the language of the program that shows it, such as the order of a short date, is in ISO
form; a point parts the decimals.
"""

import datetime
import decimal
import fractions
import functools
import math
import re
from typing import NamedTuple

_DIGITS = 15  # of a number, as spreadsheets keep them
_PART = re.compile(
    r'"(?P<quoted>[^"]*)"?|\\(?P<escaped>.)|_.|\*.|\[(?P<bracket>[^\]]*)\]'
    r"|(?P<general>General)|(?P<noon>AM/PM|A/P|上午/下午)|(?P<time>[yY]+|[mM]+|[dD]+|[hH]+|[sS]+)"
    r"|(?P<exponent>[eE][-+])|(?P<digit>[0#?])|(?P<other>.)",
    re.S,
)
_CONDITION = re.compile(r"(<=|>=|<>|<|>|=)(-?\d+(?:\.\d+)?)")
_ELAPSED = re.compile(r"h+|m+|s+", re.I)
_ISO = frozenset(("mm-dd-yy", "m/d/yy h:mm"))  # the built-in short dates
_MONTHS = "January February March April May June July August September October November December"
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"
_EPOCHS = {False: datetime.datetime(1899, 12, 30), True: datetime.datetime(1904, 1, 1)}


class _Part(NamedTuple):
    """A piece of a section: of which kind, and what it writes."""

    kind: str
    text: str


class _Section(NamedTuple):
    """What is shown of the numbers that meet a condition."""

    parts: tuple[_Part, ...]
    condition: tuple[str, float] | None
    kinds: frozenset[str]

    def holds(self, *kinds: str) -> bool:
        return not self.kinds.isdisjoint(kinds)


def shown(value: float, code: str, since_1904: bool = False) -> tuple[str, str]:
    """A number as text, and its kind: "number", "percent" or "date".

    Args:
      value: that the cell holds; of a date, days since the epoch.
      code: of the number format.
      since_1904: the epoch is 1904 and not 1900.
    """
    if code == "General":
        return general(value), "number"
    sections = _sections(code)
    numeric = sections[:3] if len(sections) > 3 else sections
    section, signed = _section_for(value, numeric)
    if section.holds("time", "elapsed"):
        when = _moment(value, since_1904)
        if when is None or value < 0:
            return general(value), "number"
        return _iso(when, value) if code in _ISO else _dated(value, when, section), "date"
    if section.holds("text"):
        return general(value), "number"
    if not section.holds("digit", "general"):
        literal = "".join(part.text for part in section.parts).strip()
        return literal, "number"
    percent = sum(part == _Part("other", "%") for part in section.parts)
    amount = (value if signed else abs(value)) * 100**percent
    text = " ".join(_number(amount, section).split())
    return text, "percent" if percent else "number"


def of_text(text: str, code: str) -> str:
    """A text under a format, which may write something around it."""
    sections = _sections(code)
    if not sections[-1].holds("text"):
        return text
    return "".join(text if it.kind == "text" else it.text for it in sections[-1].parts)


def general(value: float) -> str:
    """A number without a format."""
    return str(value) if isinstance(value, int) else f"{value:.{_DIGITS}g}"


@functools.lru_cache(1 << 10)
def _sections(code: str) -> tuple[_Section, ...]:
    sections: list[list[_Part]] = [[]]
    conditions: list[tuple[str, float] | None] = [None]
    for match in _PART.finditer(code or "General"):
        kind, text = match.lastgroup, match[0]
        if kind is None:  # room of the width of a character, or filled with it
            sections[-1].append(_Part("space", " " if text[0] == "_" else ""))
        elif kind == "bracket":
            inner = match["bracket"]
            if condition := _CONDITION.fullmatch(inner):
                conditions[-1] = condition[1], float(condition[2])
            elif _ELAPSED.fullmatch(inner):
                sections[-1].append(_Part("elapsed", inner.lower()))
            elif inner.startswith("$"):
                sections[-1].append(_Part("literal", inner[1:].partition("-")[0]))
        elif kind in ("quoted", "escaped"):
            sections[-1].append(_Part("literal", match[kind]))
        elif text == ";":
            sections.append([])
            conditions.append(None)
        elif text == "@":
            sections[-1].append(_Part("text", ""))
        elif kind == "time":
            sections[-1].append(_Part("time", text.lower()))
        else:
            sections[-1].append(_Part(kind, "" if kind == "general" else text))
    return tuple(
        _Section(tuple(parts), condition, frozenset(part.kind for part in parts))
        for parts, condition in zip(sections, conditions, strict=True)
    )


def _section_for(value: float, sections: tuple[_Section, ...]) -> tuple[_Section, bool]:
    """The section of a value, and whether a minus is still to be written."""
    if any(it.condition for it in sections):
        for section in sections:
            if section.condition is None or _meets(value, *section.condition):
                return section, True
        return _sections("General")[0], True
    if value < 0 and len(sections) > 1:
        return sections[1], False
    if value == 0 and len(sections) > 2:
        return sections[2], False
    return sections[0], True


def _meets(value: float, sign: str, bound: float) -> bool:
    order = "<" if value < bound else ">" if value > bound else "="
    return order in sign


def _number(value: float, section: _Section) -> str:
    parts = section.parts
    if section.holds("general"):
        return "".join(general(value) if part.kind == "general" else part.text for part in parts)
    slots = [at for at, part in enumerate(parts) if part.kind == "digit"]
    first, last = slots[0], slots[-1]
    slash = [at for at in slots[1:] if parts[at - 1] == _Part("other", "/")]
    if slash:
        return _fraction(value, section)
    exponent = next((at for at, part in enumerate(parts) if part.kind == "exponent"), len(parts))
    point = next((at for at in range(exponent) if parts[at] == _Part("other", ".")), exponent)
    commas = [at for at, part in enumerate(parts) if part == _Part("other", ",")]
    scaled = [at for at in commas if not any(at < slot < point for slot in slots)]
    scaled = [at for at in scaled if at > first and (at > last or at < point)]
    grouped = any(first < at < point and at not in scaled for at in commas)
    decimals = [at for at in slots if point < at < exponent]
    whole = [at for at in slots if at < min(point, exponent)]
    value = value / 1000 ** len(scaled)
    power = 0
    if exponent < len(parts):
        power = math.floor(math.log10(abs(value))) if value else 0
        value = value / 10.0**power
    digits, _, fraction = _rounded(abs(value), len(decimals)).partition(".")
    kept = len(fraction)
    while kept and parts[decimals[kept - 1]].text != "0" and fraction[kept - 1] == "0":
        kept -= 1
    written = dict(zip(decimals, fraction[:kept], strict=False))
    written |= _placed(digits, whole, parts, grouped)
    if exponent < len(parts):
        powers = [at for at in slots if at > exponent]
        written |= dict.fromkeys(powers, "")
        written[exponent] = "E" + ("-" if power < 0 else parts[exponent].text[1].strip("-"))
        written[powers[-1] if powers else exponent] = str(abs(power)).rjust(len(powers), "0")
    negative = value < 0 and any(it not in "0.," for it in digits + fraction)
    pieces = [
        written.get(at, "") if part.kind in ("digit", "exponent")
        else "" if at in commas or (at == point and decimals and not kept)
        else part.text
        for at, part in enumerate(parts)
    ]  # fmt: skip
    return ("-" if negative else "") + "".join(pieces)


def _rounded(value: float, decimals: int) -> str:
    """Halves are rounded up, of the digits that a spreadsheet keeps."""
    kept = decimal.Decimal(f"{value:.{_DIGITS}g}")
    step = decimal.Decimal(1).scaleb(-decimals)
    with decimal.localcontext() as context:
        context.prec = 400
        return f"{kept.quantize(step, decimal.ROUND_HALF_UP):f}"


def _placed(
    digits: str, slots: list[int], parts: tuple[_Part, ...], grouped: bool
) -> dict[int, str]:
    """The digits before the point, one a slot from the right; the first slot has all others."""
    digits = digits.lstrip("0")
    written: dict[int, str] = {}
    count = 0
    for at in reversed(slots):
        digit, digits = (digits[-1:], digits[:-1]) if at != slots[0] else (digits, "")
        digit = digit or ("0" if parts[at].text == "0" else "")
        piece = ""
        for one in reversed(digit):
            piece = one + ("," if grouped and count and count % 3 == 0 else "") + piece
            count += 1
        written[at] = piece
    return written


def _fraction(value: float, section: _Section) -> str:
    """As 1 1/2: the whole before the fraction where the format has room for it."""
    code = "".join(part.text for part in section.parts if part.kind in ("digit", "other", "space"))
    below = code.partition("/")[2].strip()
    whole_apart = " " in code.partition("/")[0].strip()
    most = int(below) if below.isdigit() and int(below) else 10 ** max(1, len(below)) - 1
    exact = fractions.Fraction(abs(value))
    if below.isdigit() and int(below):
        top, bottom = round(exact * most), most
    else:
        top, bottom = exact.limit_denominator(most).as_integer_ratio()
    whole, top = divmod(top, bottom) if whole_apart or bottom == 1 else (0, top)
    text = " ".join(filter(None, (str(whole) if whole else "", f"{top}/{bottom}" if top else "")))
    return ("-" if value < 0 and text else "") + (text or "0")


def _moment(value: float, since_1904: bool) -> datetime.datetime | None:
    """To the second; None for what is no moment. Day 60 is 29 February 1900, which never was."""
    try:
        days = value if since_1904 or value >= 61 else value + 1
        return _EPOCHS[since_1904] + datetime.timedelta(seconds=round(days * 86_400))
    except OverflowError:
        return None


def _iso(when: datetime.datetime, value: float) -> str:
    if value < 1:
        return when.strftime("%H:%M:%S")
    return when.date().isoformat() if value == int(value) else when.isoformat(" ")


def _dated(value: float, when: datetime.datetime, section: _Section) -> str:
    """A moment or a time by the tokens of a section."""
    parts = section.parts
    timed = [at for at, part in enumerate(parts) if part.kind in ("time", "elapsed")]
    out = []
    for at, piece in enumerate(parts):
        if piece.kind == "noon":
            out.append("AM" if when.hour < 12 else "PM")
        elif piece.kind == "elapsed":
            unit = {"h": 3600, "m": 60, "s": 1}[piece.text[0]]
            out.append(f"{round(value * 86_400) // unit:0{len(piece.text)}}")
        elif piece.kind != "time":
            fraction = piece.text == "." and parts[at + 1 : at + 2] == (_Part("digit", "0"),)
            out.append("" if fraction or piece.kind in ("digit", "text", "general") else piece.text)
        elif piece.text[0] == "m" and len(piece.text) < 3 and _is_minute(at, timed, parts):
            out.append(f"{when.minute:0{len(piece.text)}}")
        else:
            out.append(_token(piece.text, when, section.holds("noon")))
    return " ".join("".join(out).split())


def _is_minute(at: int, timed: list[int], parts: tuple[_Part, ...]) -> bool:
    """Whether an m stands behind hours or before seconds."""
    place = timed.index(at)
    before = parts[timed[place - 1]].text[0] if place else ""
    after = parts[timed[place + 1]].text[0] if place + 1 < len(timed) else ""
    return before == "h" or after == "s"


def _token(token: str, when: datetime.datetime, noon: bool) -> str:
    long, letter = len(token), token[0]
    if letter == "y":
        return f"{when.year:04}" if long > 2 else f"{when.year % 100:02}"
    if letter == "h":
        return f"{(when.hour + 11) % 12 + 1 if noon else when.hour:0{min(long, 2)}}"
    if letter == "s":
        return f"{when.second:0{min(long, 2)}}"
    number, names = (when.month, _MONTHS) if letter == "m" else (when.day, _DAYS)
    if long < 3:
        return f"{number:0{long}}"
    name = names.split()[number - 1 if letter == "m" else when.weekday()]
    return name[:1] if long == 5 else name[:3] if long == 3 else name
