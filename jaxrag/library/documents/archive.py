"""Files that are zip archives of XML: unpacked within bounds, and nothing but their text."""

import io
import zipfile
from collections.abc import Iterable, Iterator

from jaxrag.base.errors import DocumentError
from jaxrag.library.documents.files import require_few_tags

MAX_PART_BYTES = 64 << 20  # of one part once it is unpacked
MAX_UNPACKED_BYTES = 128 << 20  # of all of them

_PIECE = 1 << 16  # bytes that are unpacked at a time
_OLE = b"\xd0\xcf\x11\xe0"  # how Office stores what needs a password, and stored all until 2007


def parts(
    data: bytes,
    kind: str,
    suffixes: tuple[str, ...] = (".xml", ".rels"),
    streamed: tuple[str, ...] = (),
) -> Iterator[tuple[str, bytes]]:
    """The parts of an archive by name; those without one of the suffixes are not unpacked: b"".

    Bounded by what is unpacked in truth, whatever the directory of the archive says. Parts whose
    names begin with one of ``streamed`` are never a tree as a whole, and may have any number of
    tags. Raises DocumentError for what comes to a bound, holds too many tags or is packed in
    another way than files of this kind are, and what ``zipfile`` raises for a broken one.
    """
    if data.startswith(_OLE):
        raise DocumentError(
            f"cannot be parsed as {kind}: it needs a password or has an older format; save it anew "
            "without one"
        )
    left = MAX_UNPACKED_BYTES
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        for path, entry in entries.items():
            name = path.replace("\\", "/")  # as some programs of Windows write it
            if not name.lower().endswith(suffixes):
                yield name, b""
                continue
            if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise DocumentError(f"{name} is packed in a way that {kind} lacks; save it anew")
            part = _read(archive, entry, min(MAX_PART_BYTES, left))
            left -= len(part)
            if not name.startswith(streamed):
                require_few_tags(part)
            yield name, part


def repacked(found: Iterable[tuple[str, bytes]]) -> bytes:
    """An archive of these parts, for libraries that read one."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as plain:
        for name, part in found:
            plain.writestr(name, part)
    return out.getvalue()


def _read(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, limit: int) -> bytes:
    pieces, size = [], 0
    with archive.open(entry) as stream:
        while size <= limit and (piece := stream.read(_PIECE)):
            pieces.append(piece)
            size += len(piece)
    if size > limit:
        raise DocumentError(
            f"{entry.filename} unpacks to more than {MAX_PART_BYTES >> 20} MiB, or all parts to "
            f"more than {MAX_UNPACKED_BYTES >> 20} MiB; split the file"
        )
    return b"".join(pieces)
