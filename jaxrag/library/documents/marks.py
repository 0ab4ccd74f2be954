"""Meaning that formatting carries, written out: ``10^6``, ``H_2O``, ``~~struck out~~``, "iv."."""

import re
from collections.abc import Iterable
from typing import Any

RAISED, LOWERED, STRUCK = "^", "_", "~~"

_ORDINAL = re.compile(r"(?:st|nd|rd|th|er|re|e|ème|o|a|os|as|nde?|ª|º)", re.I)
_SIMPLE = re.compile(r"[-+\u2212\u2013]?[\w.,°\u2032*†‡]+")
_M = "{http://schemas.openxmlformats.org/officeDocument/2006/math}"
EQUATION = f"{_M}oMath"
_ROMAN = (
    (1000, "m"), (900, "cm"), (500, "d"), (400, "cd"), (100, "c"), (90, "xc"), (50, "l"),
    (40, "xl"), (10, "x"), (9, "ix"), (5, "v"), (4, "iv"), (1, "i"),
)  # fmt: skip


def marked(runs: Iterable[tuple[str, str]]) -> str:
    """Runs of text, each with its mark or '', as one text.

    What is raised or lowered is never one number with what stands before it; ordinals such as
    "1st" stay as they are.
    """
    joined: list[tuple[str, str]] = []
    for text, mark in runs:
        if joined and joined[-1][1] == mark:
            joined[-1] = joined[-1][0] + text, mark
        elif text:
            joined.append((text, mark))
    out = ""
    for at, (text, mark) in enumerate(joined):
        word = text.strip()
        following = joined[at + 1][0][:1] if at + 1 < len(joined) and text == text.rstrip() else ""
        if mark == STRUCK and word:
            text = text.replace(word, f"~~{word}~~", 1)
        elif mark and word and out[-1:].strip() and not _is_ordinal(out, text, mark):
            ends = word[-1]  # that nothing behind it may lengthen
            glued = (ends.isdigit() and following.isdigit()) or (ends + following).isalpha()
            simple = _SIMPLE.fullmatch(word) and not (glued and following)
            text = mark + (word if simple else f"({word})") + text[len(text.rstrip()) :]
        out += text
    return out


def _is_ordinal(before: str, text: str, mark: str) -> bool:
    return mark == RAISED and before[-1].isdigit() and _ORDINAL.fullmatch(text.strip()) is not None


def equation(element: Any) -> str:
    """An equation of an office file on one line, as ``E=mc^2`` or ``(a+b)/2``."""
    return " ".join(_math(element).split())


def _math(element: Any) -> str:
    parts = {child.tag.removeprefix(_M): child for child in element}

    def part(name: str) -> str:
        return _math(parts[name]) if name in parts else ""

    def value(kind: str, name: str, default: str) -> str:
        found = element.find(f"{_M}{kind}Pr/{_M}{name}")
        return default if found is None else found.get(f"{_M}val", "")

    name = element.tag.removeprefix(_M)
    if name == "t":
        return element.text or ""
    if name in ("sSup", "sSub", "sSubSup", "limLow", "limUpp"):
        low = part("sub") or (part("lim") if name == "limLow" else "")
        high = part("sup") or (part("lim") if name == "limUpp" else "")
        return _grouped(part("e")) + _scripts(low, high)
    if name == "f":
        return f"{_grouped(part('num'))}/{_grouped(part('den'))}"
    if name == "rad":
        return f"{'root' + _scripts(part('deg'), '') if part('deg') else 'sqrt'}({part('e')})"
    if name == "nary":
        return value(name, "chr", "∫") + _scripts(part("sub"), part("sup")) + f" {part('e')}"
    if name == "d":
        inner = value(name, "sepChr", "|").join(_math(it) for it in element.findall(f"{_M}e"))
        return value(name, "begChr", "(") + inner + value(name, "endChr", ")")
    if name in ("m", "mr"):
        rows = [_math(it) for it in element if it.tag in (f"{_M}mr", f"{_M}e")]
        return "[" + "; ".join(rows) + "]" if name == "m" else ", ".join(rows)
    return "".join(_math(it) for it in element if isinstance(it.tag, str))


def _scripts(low: str, high: str) -> str:
    return ("_" + _grouped(low) if low else "") + ("^" + _grouped(high) if high else "")


def _grouped(text: str) -> str:
    return text if re.fullmatch(r"-?[\w.,∞]*", text) else f"({text})"


def counted(number: int, form: str) -> str:
    """A number as lists show it: form is as in "lowerLetter", "upperRoman" or "decimalZero"."""
    if number > 0 and "etter" in form:
        letter = chr(ord("a") + (number - 1) % 26) * min((number - 1) // 26 + 1, 9)
        return letter.upper() if form.startswith("upper") else letter
    if 0 < number < 5000 and "oman" in form:
        text = ""
        for value, digits in _ROMAN:
            text += digits * (number // value)
            number %= value
        return text.upper() if form.startswith("upper") else text
    return f"{number:02}" if form == "decimalZero" else str(number)
