"""Readers of .html, .epub and .eml: the main text of pages, chapters and messages.

Headings, lists, tables and code become Markdown lines.
"""

import datetime
import email
import email.policy
import html.entities
import posixpath
import re
from collections.abc import Iterator, Mapping
from email.message import EmailMessage
from typing import Any, BinaryIO
from urllib.parse import unquote

from jaxrag.base.errors import DocumentError
from jaxrag.library.documents.blocks import Block, joined, names, one_spaced
from jaxrag.library.documents.document import MAX_TITLE_CHARACTERS, BadDocument, Document
from jaxrag.library.documents.files import (
    File,
    decode,
    is_encoding,
    marked_encoding,
    one_line,
    parsing,
    parts,
    read_bytes,
    require_few_tags,
)
from jaxrag.library.documents.metadata import typed

_DROPPED = names(
    "script style noscript template nav aside footer iframe object svg button select textarea "
    "head datalist canvas audio video rt rp"
)
_BLOCKS = names(
    "address article blockquote body center dd details div dl dt fieldset figcaption figure form "
    "header hr html li main ol p section summary table tbody tfoot thead tr ul"
)
_HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}
_CELLS = frozenset(("td", "th"))
_SPACE = re.compile(r"[ \t\n\r\f\v\u00a0]+")
_DECLARED = re.compile(rb"""<meta[^>]{0,500}?charset\s*=\s*["']?\s*([A-Za-z0-9_:.-]{1,40})""", re.I)
_XML_DECLARED = re.compile(rb"""^\s*<\?xml[^>]{0,100}?encoding\s*=\s*["']([A-Za-z0-9_.-]{1,40})""")
_META = 64  # names that a page may give
_META_CHARACTERS = 2_000  # of a name or value; what is longer is left out
_META_OF_DISPLAY = names(
    "viewport theme-color color-scheme referrer robots googlebot format-detection generator "
    "handheldfriendly mobileoptimized apple-mobile-web-app-capable csrf-token csrf-param"
)
_DECLARED_WITHIN = 4096  # bytes
# Pages that name the left one mean the right one, as browsers read them.
_MEANT = {
    "iso-8859-1": "cp1252",
    "latin1": "cp1252",
    "us-ascii": "cp1252",
    "ascii": "cp1252",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "shift_jis": "cp932",
    "ks_c_5601-1987": "cp949",
    "euc-kr": "cp949",
    "utf-16": "utf-8",
}
_PARTS = (".xml", ".opf", ".xhtml", ".html", ".htm")
_CONTAINER = "META-INF/container.xml"
_ENCRYPTION = "META-INF/encryption.xml"
_ENTITY = re.compile(r"&([A-Za-z][A-Za-z0-9]{1,31});")
_OF_XML = frozenset(("amp", "lt", "gt", "quot", "apos"))
_XHTML = "{http://www.w3.org/1999/xhtml}"


def read_html(stream: BinaryIO, file: File) -> Iterator[Document | BadDocument]:
    """One document: the main text of a page, titled by its <title>.

    Metadata are what ``<meta name=... content=...>`` say, under names in lower case, and the
    ``lang`` of the page; names about how a page is shown are left out.
    Scripts, styles, menus and footers are left out; where the page marks its <main> part or single
    <article>, so is everything around it. The encoding is that of a byte order mark, the option,
    the page's own declaration or UTF-8, in this order.
    """
    data = read_bytes(stream)
    require_few_tags(data)
    text = decode(data, file.options.encoding or declared_encoding(data))
    if not text.strip():
        raise DocumentError("the file is empty; leave it out")
    with parsing("HTML"):
        root = _parsed(text)
        title, body = text_of(root)
        metadata = {} if root is None else _metadata_of(root)
        visible = 0 if root is None else len(_Writer().write(root))
        if 0 < len(body) < visible / 2:
            share = f"{100 * len(body) / visible:.0f} % kept"
            file.left_out.add("characters of its visible text", share, visible - len(body))
    empty = "holds no text outside of scripts and menus; leave the file out"
    yield file.document(body, title, metadata, empty=empty)


def declared_encoding(data: bytes) -> str | None:
    """The encoding that a page names for itself; DocumentError when there is no such encoding."""
    if marked_encoding(data):
        return None
    head = data[:_DECLARED_WITHIN]
    found = _DECLARED.search(head) or _XML_DECLARED.search(head)
    if found is None:
        return None
    name = found.group(1).decode("ascii").lower()
    name = _MEANT.get(name, name)
    if not is_encoding(name):
        raise DocumentError(f"declares the encoding {name!r}, which is unknown; name its encoding")
    return name


def html_text(page: str) -> tuple[str, str]:
    """Title and main text of a page; the text is '' when there is none.

    Raises DocumentError for a page nested more than 2048 deep, of which the parser drops the rest.
    """
    return text_of(_parsed(page))


def _parsed(page: str) -> Any:
    from lxml import etree, html  # only who reads HTML waits for it

    parser = html.HTMLParser(
        encoding="utf-8", remove_comments=True, remove_pis=True, huge_tree=True
    )
    page = page.replace("\0", "\ufffd")
    root = etree.fromstring(page.encode("utf-8", "replace"), parser)
    if any(entry.type_name == "ERR_RESOURCE_LIMIT" for entry in parser.error_log):
        raise DocumentError("is nested too deeply to be read to its end; flatten the page")
    return root


def _metadata_of(root: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if lang := (root.get("lang") or "").strip():
        found["lang"] = lang[:_META_CHARACTERS]
    for element in root.iter("meta"):
        name = (element.get("name") or "").strip().lower()
        content = _SPACE.sub(" ", element.get("content") or "").strip()
        if not name or not content or name in _META_OF_DISPLAY or len(found) >= _META:
            continue
        if name not in found and max(len(name), len(content)) <= _META_CHARACTERS:
            found[name] = typed(content)
    return found


def text_of(root: Any) -> tuple[str, str]:
    """Title and main text of a parsed page, whose tags are in no namespace."""
    if root is None:
        return "", ""
    titles = [element for element in root.iter("title") if element.getparent().tag == "head"]
    title = _SPACE.sub(" ", "".join(titles[0].itertext())).strip() if titles else ""
    articles = list(root.iter("article"))
    for part in (*list(root.iter("main"))[:1], *(articles if len(articles) == 1 else ())):
        text = _Writer().write(part)
        if text:
            break
    else:
        text = _Writer().write(root)
    if not title and text.startswith("# "):
        title = text[2:].partition("\n")[0].strip()
    return title, text


class _Writer:
    """Turns one element into text: blocks apart by empty lines, items and rows one a line."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._inline: list[str] = []
        self._lead = ""  # "# " or "- " of the block under way
        self._kind = ""
        self._verbatim = 0  # depth of <pre>
        self._row = 0  # depth of rows of data

    def write(self, element: Any) -> str:
        from lxml import etree

        events = etree.iterwalk(element, events=("start", "end"))
        for event, node in events:
            tag = node.tag if isinstance(node.tag, str) else ""
            if event == "start":
                if tag in _DROPPED or node.get("hidden") is not None:
                    events.skip_subtree()
                    continue
                self._open(tag, node)
                self._add(node.text)
            else:
                if tag not in _DROPPED and node.get("hidden") is None:
                    self._close(tag)
                if node is not element:
                    self._add(node.tail)
        self._flush()
        return joined(self._blocks)

    def _open(self, tag: str, node: Any) -> None:
        if tag == "pre":
            self._flush()
            self._verbatim += 1
        elif tag == "br":
            self._inline.append(" " if self._row else "\n")
        elif tag in _CELLS:
            if self._row:
                self._inline.append(" | " if self._inline else "")
            else:
                self._flush()
        elif self._row:
            self._inline.append(" " if tag in _BLOCKS else "")
        elif tag in _HEADINGS or tag in _BLOCKS:
            self._flush()
            if tag == "tr" and _is_data(node):
                self._row += 1
            elif tag in _HEADINGS:
                self._lead = _HEADINGS[tag]
            elif tag == "li":
                self._lead, self._kind = "- ", "item"

    def _close(self, tag: str) -> None:
        if tag == "pre":
            self._flush()
            self._verbatim -= 1
        elif self._row:
            if tag == "tr":
                self._kind = "row"
                self._flush()
                self._row -= 1
            elif tag in _BLOCKS:
                self._inline.append(" ")
        elif tag in _HEADINGS or tag in _BLOCKS or tag in _CELLS:
            self._flush()

    def _add(self, text: str | None) -> None:
        if text:
            self._inline.append(text if self._verbatim else _SPACE.sub(" ", text))

    def _flush(self) -> None:
        """End the block under way."""
        text = "".join(self._inline)
        self._inline = []
        if self._verbatim:
            text = text.strip("\n")
            text = f"```\n{text}\n```" if text.strip() else ""
        else:
            lines = [" ".join(line.split()) for line in text.split("\n")]
            text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
            if self._kind == "row" and len(filled := [c for c in text.split("|") if c.strip()]) < 2:
                text, self._kind = "".join(filled).strip(), ""  # one cell is a paragraph
            if text and self._lead:
                text = self._lead + (text if self._lead == "- " else " ".join(text.split()))
        if text:
            self._blocks.append((self._kind, text))
            self._lead, self._kind = "", ""
        elif self._lead != "- ":  # an item's text may stand in a paragraph of its own
            self._lead, self._kind = "", ""


def _is_data(row: Any) -> bool:
    """Whether a table row is data, one line of text, and not a means of layout."""
    structure = _BLOCKS | _HEADINGS.keys() | {"br", "pre"}
    return not any(node.tag in structure for node in row.iterdescendants())


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


def read_epub(stream: BinaryIO, file: File) -> Iterator[Document | BadDocument]:
    """One document: the text of all chapters as that of web pages, but for the table of contents.

    Titled by the book; metadata are its ``author``, ``lang`` and ``date``, where they are given. A
    chapter that cannot be read is reported, the others are kept. Refused: a book that is encrypted,
    and one beyond the bounds of ``archive``.
    """
    data = read_bytes(stream)
    with parsing("EPUB"):
        found = dict(parts(data, "EPUB", _PARTS))
        folder, package = _package(found)
        chapters = list(_chapters(package, folder))
        locked = _locked(found)
        title, metadata = _described(package)
    texts = []
    bad = 0
    for name in chapters:
        if name in locked:
            raise DocumentError("is encrypted; only a copy of it without protection can be read")
        try:
            texts.append(_chapter(found, name))
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


def _chapter(found: Mapping[str, bytes], name: str) -> str:
    from lxml import etree

    data = _part(found, name)
    page = decode(data, declared_encoding(data))
    try:
        root = _tree(_ENTITY.sub(_character, page).encode(), "utf-8")
    except etree.XMLSyntaxError:  # a page as browsers take it
        return html_text(page)[1]
    for element in root.iter(f"{_XHTML}*"):
        element.tag = element.tag.removeprefix(_XHTML)
    return text_of(root)[1]


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
