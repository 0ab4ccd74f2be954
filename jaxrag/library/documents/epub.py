"""Reader of .epub: the text of all chapters, as that of web pages."""

import html.entities
import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO
from urllib.parse import unquote

from jaxrag.base.errors import DocumentError
from jaxrag.library.documents.blocks import one_spaced
from jaxrag.library.documents.document import BadDocument, Document
from jaxrag.library.documents.files import File, decode_kept, one_line, parsing, parts, read_bytes
from jaxrag.library.documents.html import declared_encoding, html_text, text_of

_PARTS = (".xml", ".opf", ".xhtml", ".html", ".htm")
_CONTAINER = "META-INF/container.xml"
_ENCRYPTION = "META-INF/encryption.xml"
_ENTITY = re.compile(r"&([A-Za-z][A-Za-z0-9]{1,31});")
_OF_XML = frozenset(("amp", "lt", "gt", "quot", "apos"))


def read_epub(stream: BinaryIO, file: File) -> Iterator[Document | BadDocument]:
    """One document: the text of all chapters as that of web pages, but for the table of contents.

    Titled by the book; metadata are its ``author``, ``lang`` and ``date``, where they are given. A
    chapter that cannot be read is reported, the others are kept. Refused: a book that is encrypted,
    and one beyond the bounds of ``archive``.
    """
    data = read_bytes(stream)
    with parsing("EPUB"):
        entries = dict(parts(data, "EPUB", _PARTS))
        folder, package = _package(entries)
        chapters = list(_chapters(package, folder))
        locked = _locked(entries)
        title, metadata = _described(package)
    texts = []
    bad = 0
    for name in chapters:
        if name in locked:
            raise DocumentError("is encrypted; only a copy of it without protection can be read")
        try:
            texts.append(_chapter(entries, name, file))
        except MemoryError:
            raise
        except Exception as error:  # whatever its parser may raise
            why = str(error) if isinstance(error, DocumentError) else one_line(error)
            yield file.bad(f"the chapter cannot be read ({why})", f", {name}")
            bad += 1
    body = "\n\n".join(filter(None, texts))
    if body:
        yield file.document(body, title, metadata)
    elif not bad:
        raise DocumentError("holds no chapter with text; leave the file out")


def _package(found: Mapping[str, bytes]) -> tuple[str, Any]:
    """The folder of the package document, which says what the book is made of, and its root."""
    container = _tree(_part(found, _CONTAINER))
    for element in _all(container, "rootfile"):
        name = element.get("full-path") or ""
        return posixpath.dirname(name), _tree(_part(found, name))
    raise DocumentError(f"{_CONTAINER} names no package; save the file anew")


def _chapters(package: Any, folder: str) -> Iterator[str]:
    """Names of the parts to be read, in their order, each once."""
    items = {element.get("id"): element for element in _all(package, "item")}
    seen = set()
    for place in _all(package, "itemref"):
        element = items.get(place.get("idref"))
        if element is None or "nav" in (element.get("properties") or "").split():
            continue
        name = _resolved(folder, element.get("href") or "")
        if name not in seen and name.lower().endswith(_PARTS):
            seen.add(name)
            yield name


def _described(package: Any) -> tuple[str, dict[str, Any]]:
    def said(name: str) -> list[str]:
        texts = (one_spaced("".join(element.itertext())) for element in _all(package, name))
        return [text for text in texts if text]

    metadata: dict[str, Any] = {}
    if authors := said("creator"):
        metadata["author"] = ", ".join(authors)
    for name, label in (("language", "lang"), ("date", "date")):
        if texts := said(name):
            metadata[label] = texts[0]
    return next(iter(said("title")), ""), metadata


def _locked(found: Mapping[str, bytes]) -> set[str]:
    """Names of the parts that are encrypted; fonts often are, and nothing else."""
    if not found.get(_ENCRYPTION):
        return set()
    references = _all(_tree(found[_ENCRYPTION]), "CipherReference")
    return {_resolved("", element.get("URI") or "") for element in references}


def _chapter(found: Mapping[str, bytes], name: str, file: File) -> str:
    from lxml import etree

    data = _part(found, name)
    page = decode_kept(data, file.left_out, declared_encoding(data))
    try:
        root = _tree(_ENTITY.sub(_character, page).encode(), "utf-8")
    except etree.XMLSyntaxError:  # a page as browsers take it
        return html_text(page, file.left_out)[1]
    for element in root.iter("{*}*"):  # of MathML and SVG, too
        element.tag = element.tag.rpartition("}")[2]
    return text_of(root, file.left_out)[1]


def _character(found: re.Match[str]) -> str:
    """What an entity of HTML stands for; XML knows none of them."""
    name = found.group(1)
    kept = found.group()
    return kept if name in _OF_XML else html.entities.html5.get(f"{name};", kept)


def _tree(data: bytes, encoding: str | None = None) -> Any:
    """The root of XML, in which no entity is replaced and nothing outside of it is read.

    It has this encoding, whatever it says, or else the one that it says.
    """
    from lxml import etree  # only who reads EPUB waits for it

    parser = etree.XMLParser(
        resolve_entities=False, no_network=True, load_dtd=False, remove_comments=True,
        remove_pis=True, encoding=encoding,
    )  # fmt: skip
    return etree.fromstring(data, parser)


def _all(root: Any, name: str) -> Iterator[Any]:
    """Elements of that name, in whatever namespace."""
    yield from root.iter(f"{{*}}{name}")


def _part(found: Mapping[str, bytes], name: str) -> bytes:
    if not found.get(name):
        raise DocumentError(f"{name} is not in it, or empty; save the file anew")
    return found[name]


def _resolved(folder: str, href: str) -> str:
    """The name of a part, as another part of that folder refers to it."""
    return posixpath.normpath(posixpath.join(folder, unquote(href.partition("#")[0])))
