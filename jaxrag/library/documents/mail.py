"""Reader of .eml: the text of a message, and what its header says."""

import datetime
import email
import email.policy
from collections.abc import Iterator
from email.message import EmailMessage
from typing import Any, BinaryIO

from jaxrag.library.documents.document import MAX_TITLE_CHARACTERS, BadDocument, Document
from jaxrag.library.documents.files import File, parsing, read_bytes, require_few_tags
from jaxrag.library.documents.html import html_text


def read_mail(stream: BinaryIO, file: File) -> Iterator[Document | BadDocument]:
    """One document: the plain text of a message, else the text of its page; titled by its subject.

    Metadata are ``from`` and ``to``, ``date`` in ISO form, and the names of ``attachments``, which
    are not read.
    """
    data = read_bytes(stream)
    with parsing("a message"):
        message = email.message_from_bytes(data, policy=email.policy.default)
        body, metadata = _body(message), _metadata(message)
        subject = " ".join(str(message["subject"] or "").split())
    title = subject[:MAX_TITLE_CHARACTERS] or file.path.stem
    yield file.document(_whole(body), _whole(title), metadata)


def _body(message: EmailMessage) -> str:
    part = message.get_body(("plain", "html"))
    if part is None:
        return ""
    text = str(part.get_content()).replace("\r\n", "\n").replace("\r", "\n")
    if part.get_content_subtype() != "html":
        return text
    require_few_tags(text.encode("utf-8", "replace"))
    return html_text(text)[1]


def _metadata(message: EmailMessage) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("from", "to"):
        if message[name] is not None:
            found[name] = _whole(" ".join(str(message[name]).split()))
    when = getattr(message["date"], "datetime", None)
    if isinstance(when, datetime.datetime):
        found["date"] = when.isoformat()
    attached = [part.get_filename() for part in message.iter_attachments()]
    if named := [_whole(name) for name in attached if name]:
        found["attachments"] = named
    return found


def _whole(text: str) -> str:
    """Without what a header's undecoded bytes leave: halves of surrogate pairs."""
    return text.encode("utf-8", "replace").decode()
