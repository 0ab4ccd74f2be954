"""Reader of .eml: the texts of a message in their order, and of the messages forwarded in it."""

import datetime
import email
import email.policy
import re
from collections.abc import Iterator
from email.message import MIMEPart
from typing import Any, BinaryIO

from jaxrag.library.documents.document import MAX_TITLE_CHARACTERS, BadDocument, Document
from jaxrag.library.documents.files import (
    File,
    decode_kept,
    parsing,
    read_bytes,
    require_few_tags,
    require_short,
)
from jaxrag.library.documents.html import declared_encoding, html_text

_WORD = re.compile(r"\w+")
_FEW = 0.1  # of the words of a text: what another text may lack and say the same
# A text in the place of another that a program cannot show, or may not.
_STUB = re.compile(r"(?i)\bhtml\b|\bbrowser\b|(?:e-?mail|mail) (?:client|program|reader)")
_STUB_WORDS = 60
_MOST_FORWARDED = 20  # messages inside of one another
_VISUAL = re.compile(r"(?i)(iso-8859-[68])-[ei]")  # how lines are written, and no other letters


def read_mail(stream: BinaryIO, file: File) -> Iterator[Document | BadDocument]:
    """One document: the texts of a message in their order; titled by its subject.

    Of texts that stand for each other the plain one is read, unless the page says more; forwarded
    messages stand behind their sender and subject. Metadata are ``from`` and ``to``, ``date`` in
    ISO form, and the names of ``attachments``, which are not read, and are counted.
    """
    data = read_bytes(stream)
    with parsing("a message"):
        message: MIMEPart = email.message_from_bytes(data, policy=email.policy.default)
        attached: list[str] = []
        body = "\n\n".join(_texts(message, file, attached, 0))
        require_short(len(body))
        metadata = _metadata(message, attached)
        subject = _header(message, "subject")
    yield file.document(body, subject[:MAX_TITLE_CHARACTERS] or file.path.stem, metadata)


def _texts(part: MIMEPart, file: File, attached: list[str], depth: int) -> Iterator[str]:
    """The texts below a part of a message; names of what is attached are added to ``attached``."""
    kind = part.get_content_type()
    if kind == "message/rfc822" and depth < _MOST_FORWARDED and part.is_multipart():
        for inner in part.iter_parts():
            head = (f"{name.capitalize()}: {_header(inner, name)}" for name in ("from", "subject"))
            yield "\n".join(line for line in head if not line.endswith(": "))
            yield from _texts(inner, file, attached, depth + 1)
    elif kind == "multipart/alternative" and depth < _MOST_FORWARDED:
        yield from _fullest(
            [list(_texts(it, file, attached, depth + 1)) for it in part.iter_parts()], file
        )
    elif part.is_multipart() and depth < _MOST_FORWARDED:
        for inner in part.iter_parts():
            yield from _texts(inner, file, attached, depth + 1)
    elif kind in ("text/plain", "text/html") and part.get_content_disposition() != "attachment":
        if text := _text(part, file).strip():
            yield text
    else:
        name = _whole(part.get_filename() or "")
        attached += [name] if name else []
        file.left_out.add("attachments", name or kind)


def _fullest(texts: list[list[str]], file: File) -> list[str]:
    """That one of texts, the plainest first, which says what the others say."""
    best: list[str] = []
    for other in texts:
        mine, theirs = ({*_WORD.findall(" ".join(it).lower())} for it in (best, other))
        if not mine or len(mine - theirs) <= _FEW * len(mine):
            best = other if len(theirs - mine) > _FEW * len(theirs) else best
        elif len(theirs - mine) > _FEW * len(theirs):
            stubs = [len(it) < _STUB_WORDS and bool(_STUB.search(" ".join(text)))
                     for it, text in ((mine, best), (theirs, other))]  # fmt: skip
            if stubs[0] == stubs[1]:
                file.left_out.add("texts beside another with other words")
            if stubs[0] > stubs[1] or (stubs[0] == stubs[1] and len(theirs) > len(mine)):
                best = other
    return best


def _text(part: MIMEPart, file: File) -> str:
    data = part.get_payload(decode=True)
    assert isinstance(data, bytes)  # of a part that holds no others
    page = part.get_content_subtype() == "html"
    declared = str(part.get_param("charset") or (page and declared_encoding(data)) or "")
    text = decode_kept(data, file.left_out, _VISUAL.sub(r"\1", declared) or None)
    if not page:
        return text
    require_few_tags(data)
    return html_text(text, file.left_out)[1]


def _metadata(message: MIMEPart, attached: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: _header(message, name) for name in ("from", "to") if message[name] is not None
    }
    when = getattr(message["date"], "datetime", None)
    if isinstance(when, datetime.datetime):
        found["date"] = when.isoformat()
    return found | ({"attachments": attached} if attached else {})


def _header(message: MIMEPart, name: str) -> str:
    return _whole(" ".join(str(message[name] or "").split()))


def _whole(text: str) -> str:
    """Without what a header's undecoded bytes leave: halves of surrogate pairs."""
    return text.encode("utf-8", "replace").decode()
