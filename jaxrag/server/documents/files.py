"""/v1/files: uploads of a tenant, each a multipart form."""

import asyncio
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote_to_bytes

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse

from jaxrag.server.errors import invalid
from jaxrag.server.fields import note_of
from jaxrag.server.state.entry import Call, enter, with_notes
from jaxrag.server.state.lists import page_of
from jaxrag.server.state.registry import FileRow
from jaxrag.server.state.uploads import plain_name

_MOST_LISTED = 10_000
_FILE = "file"  # the field that carries it
_PURPOSE = "purpose"
_BUFFER = 1 << 20  # bytes that are written at once
_FIELD_BYTES = 4096  # of any other field
_MOST_PARTS = 32
_QUOTED = re.compile(  # up to the last quotation mark that ends it, other parameters behind it
    rb'(?is);\s*filename="(.*?)"\s*(?:;\s*[\w*-]+=(?:"[^"]*"|[^";\s]*)\s*)*$'
)
_EXTENDED = re.compile(rb"""(?i);\s*filename\*\s*=\s*"?utf-8'[^']*'([^\s;"]+)""")  # RFC 5987
_ESCAPED = re.compile(rb"(?i)%(22|0a|0d)")  # what browsers and OpenAI's client escape


def list_files(call: Call) -> dict[str, Any]:
    """The tenant's files, newest first."""
    purpose = call.query.get("purpose")
    files = [row for row in call.library.files(call.access) if purpose in (None, row.purpose)]
    return page_of(call, files, lambda row: row.id, _shown, default=_MOST_LISTED, most=_MOST_LISTED)


def get_file(call: Call) -> dict[str, Any]:
    """One of them."""
    return _shown(call.library.file(call.access, call.path["file"]))


def file_content(call: Call) -> FileResponse:
    """Its bytes, as they were uploaded."""
    found = call.library.file(call.access, call.path["file"])
    return FileResponse(
        call.library.uploads.path(found),
        media_type="application/octet-stream",
        filename=found.filename,
        headers={"x-content-type-options": "nosniff"},
    )


def delete_file(call: Call) -> dict[str, Any]:
    """Remove a file, and its documents from every vector store."""
    call.library.remove_file(call.access, call.path["file"])
    return {"id": call.path["file"], "object": "file", "deleted": True}


def _shown(file: FileRow) -> dict[str, Any]:
    """A file as clients know it."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


async def create_file(request: Request) -> JSONResponse:
    """Store the file of a form; it is durable when this answers, and gone where it raises.

    It goes to the disk while it is received. Problem 400 for what is no such form.
    """
    call = await enter(request, reads=False)
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise invalid(
            "expected multipart/form-data with a file; the client's files.create sends it"
        )
    form = _Form()
    parser = MultipartParser(boundary, form.callbacks())  # type: ignore[arg-type]
    upload = await asyncio.to_thread(call.library.begin, call.access)
    try:
        try:
            async for data in request.stream():
                parser.write(data)
                if len(form.pending) >= _BUFFER:
                    await asyncio.to_thread(upload.write, form.taken())
            parser.finalize()
        except MultipartParseError as error:
            raise invalid(f"the form cannot be read ({error}); send it anew") from None
        if not form.ended or form.filename is None:
            raise invalid("the form has no file; send it in the field 'file'", _FILE)
        await asyncio.to_thread(upload.write, form.taken())
        name = plain_name(form.filename)
        if not name:
            raise invalid("the file has no name; its ending says what kind of file it is", _FILE)
        purpose = form.fields.get(_PURPOSE, b"").decode("utf-8", "replace")
        made = await asyncio.to_thread(upload.finish, name, purpose or "assistants")
        notes = note_of(field for field in form.fields if field != _PURPOSE)
        return JSONResponse(with_notes(_shown(made), notes))
    except BaseException:
        upload.abort()
        raise


def _filename(disposition: bytes) -> bytes | None:
    """The quoted name of a file, whole; None where it is written in another way.

    Clients write a quotation mark in it as %22, with a backslash before it, or as it is.
    """
    found = _QUOTED.search(disposition)
    if found is None:
        return None
    name = found[1].replace(b'\\"', b'"')
    return _ESCAPED.sub(lambda it: bytes.fromhex(it[1].decode()), name)


class _Form:
    """What the parser tells, part by part.

    Attributes:
      pending: bytes of the file that are not written yet.
      filename: of the file; None before it came.
      fields: all other fields, by name.
      ended: whether the form is whole.
    """

    def __init__(self) -> None:
        self.pending = bytearray()
        self.filename: str | None = None
        self.fields: dict[str, bytes] = {}
        self.ended = False
        self._parts = 0
        self._header, self._value = bytearray(), bytearray()
        self._disposition = b""
        self._name: str | None = None  # of the field; None while its part is the file

    def callbacks(self) -> dict[str, Callable[..., Any]]:
        """For the parser."""
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._on_header,
            "on_header_value": self._on_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers,
            "on_part_data": self._on_data,
            "on_end": self._on_end,
        }

    def taken(self) -> bytes:
        """The pending bytes, which are pending no more."""
        data = bytes(self.pending)
        self.pending.clear()
        return data

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise invalid(f"the form has more than {_MOST_PARTS} parts; send one file")
        self._disposition = b""

    def _on_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _on_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        extended = _EXTENDED.search(self._disposition)
        if b"filename" not in options and extended is not None:
            options[b"filename"] = unquote_to_bytes(extended[1])
        if b"filename" not in options:
            self._name = name
            self.fields[name] = b""
            return
        if name != _FILE or self.filename is not None:
            raise invalid(f"the form has a file in the field {name!r}; send one, in 'file'", _FILE)
        self._name = None
        raw = _filename(self._disposition)
        self.filename = (options[b"filename"] if raw is None else raw).decode("utf-8", "replace")

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._name is None:
            self.pending += data[start:end]
            return
        held = self.fields[self._name] + data[start:end]
        if len(held) > _FIELD_BYTES:
            raise invalid(f"the field {self._name!r} has more than {_FIELD_BYTES} bytes")
        self.fields[self._name] = held

    def _on_end(self) -> None:
        self.ended = True
