"""Readers of .jsonl and .json, which hold many documents."""

import codecs
import dataclasses
from collections.abc import Iterator
from typing import Any, BinaryIO

from jaxrag.base.errors import DocumentError
from jaxrag.library.documents.document import BadDocument, Document, document_from_mapping
from jaxrag.library.documents.files import (
    MAX_LINE_BYTES,
    File,
    decode,
    marked_encoding,
    parse_json,
    read_bytes,
)


def read_json_lines(stream: BinaryIO, file: File) -> Iterator[Document | BadDocument]:
    """One JSON object a line; its id is ``name/"id"``, or else ``name:line``."""
    encoding = file.options.encoding
    start = stream.read(4)
    stream.seek(0)
    if marked_encoding(start) == "utf-16" or (encoding and "\n".encode(encoding) != b"\n"):
        yield file.bad("is not in lines of UTF-8, as JSON lines are, but UTF-16; convert the file")
        return
    empty = True
    number = 0
    while raw := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(raw) > MAX_LINE_BYTES:
            yield file.bad(f"the line is larger than {MAX_LINE_BYTES >> 20} MiB", f":{number}")
            _skip_line(stream)
        elif raw.strip() and raw != codecs.BOM_UTF8:
            where = f":{number}"
            try:
                value = parse_json(decode(raw, encoding), "one object per line")
                yield _record(value, file, where)
            except DocumentError as error:
                yield file.bad(error, where)
        else:
            continue
        empty = False
    if empty:
        yield file.bad("holds no JSON lines; leave the file out")


def read_json(stream: BinaryIO, file: File) -> Iterator[Document | BadDocument]:
    """One object, a list of them, or ``{"documents": [...]}``; ids ``name/"id"``, ``name[0]``."""
    text_field = file.options.text_field or "text"
    value = parse_json(decode(read_bytes(stream), file.options.encoding), "objects with a text")
    if isinstance(value, dict) and "documents" in value and text_field not in value:
        value = value["documents"]
        if not isinstance(value, list):
            raise DocumentError('"documents" is not a list; expected one of objects with a text')
    if not isinstance(value, list):
        yield _record(value, file, "")
        return
    if not value:
        yield file.bad("holds no documents; leave the file out")
    for index, item in enumerate(value):
        where = f"[{index}]"
        try:
            yield _record(item, file, where)
        except DocumentError as error:
            yield file.bad(error, where)


def _record(value: Any, file: File, where: str) -> Document:
    text_field = file.options.text_field or "text"
    if not isinstance(value, dict):
        raise DocumentError(f'holds a {type(value).__name__}; expected {{"{text_field}": "..."}}')
    made = document_from_mapping(value, file.name + where, file.reported, text_field)
    if "id" not in value:
        return made
    return dataclasses.replace(made, id=f"{file.name}/{made.id}")  # every export numbers from 1


def _skip_line(stream: BinaryIO) -> None:
    while (rest := stream.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
        pass
