"""POST /markdown: Markdown as a tree of elements, for the page.

The page makes elements of it by name, so text cannot become markup: HTML in it stays text, images
are their descriptions, and links lead to web and mail addresses only.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from markdown_it import MarkdownIt
from markdown_it.token import Token
from pydantic import Field

from jaxrag.server.errors import invalid
from jaxrag.server.fields import Fields, Texts
from jaxrag.server.state.entry import Call

MOST_TEXTS = 100
MOST_CHARACTERS = 1 << 17  # of all texts of a request
_BLOCKS = ("p", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "pre", "hr")
_INLINE = ("code", "em", "strong", "s", "a", "br")
_TABLE = ("table", "thead", "tbody", "tr", "th", "td")
TAGS = frozenset((*_BLOCKS, *_INLINE, *_TABLE))
SCHEMES = ("http", "https", "mailto")

Node = str | list[Any]  # a text, or [tag, address or None, nodes]

_PARSER = MarkdownIt("commonmark", {"html": False, "maxNesting": 100})
_PARSER.enable(["table", "strikethrough"])


class _Fields(Fields):
    texts: Annotated[Texts, Field(max_length=MOST_TEXTS)] = Field([])


def markdown(call: Call) -> dict[str, Any]:
    """The nodes of every text in ``texts``, in ``nodes``. Raises Problem 400 for too much text."""
    texts = call.read(_Fields).texts
    if sum(map(len, texts)) > MOST_CHARACTERS:
        raise invalid(f"texts: expected at most {MOST_CHARACTERS} characters in all", "texts")
    return {"object": "markdown", "nodes": [nodes_of(text) for text in texts]}


def nodes_of(text: str) -> list[Node]:
    """Markdown as nodes: texts, and [tag, address or None, nodes] with a tag of ``TAGS``."""
    return _nodes(_PARSER.parse(text))


def _nodes(tokens: Iterable[Token]) -> list[Node]:
    lines: list[Node] = []
    open_ones = [lines]
    for token in tokens:
        if token.nesting == 1:
            inside: list[Node] = []
            if _is_shown(token):
                address = token.attrGet("href")
                open_ones[-1].append([token.tag, None if address is None else str(address), inside])
            else:
                inside = open_ones[-1]
            open_ones.append(inside)
        elif token.nesting == -1:
            open_ones.pop()
        else:
            open_ones[-1] += _leaf(token)
    return lines


def _is_shown(token: Token) -> bool:
    """Is an element made of it? What stands in others is shown without them."""
    if token.hidden or token.tag not in TAGS:
        return False
    scheme = str(token.attrGet("href")).partition(":")[0].lower()
    return token.tag != "a" or scheme in SCHEMES


def _leaf(token: Token) -> Sequence[Node]:
    if token.type == "inline":
        return _nodes(token.children or ())
    if token.type == "image":
        return [f"[{token.content}]"] if token.content else []
    if token.type in ("fence", "code_block"):
        return [["pre", None, [["code", None, [token.content]]]]]
    if token.type == "code_inline":
        return [["code", None, [token.content]]]
    if token.type == "softbreak":
        return ["\n"]
    if token.tag in TAGS:  # br, hr
        return [[token.tag, None, []]]
    return [token.content] if token.content else []
