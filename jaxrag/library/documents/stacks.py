"""How common RAG stacks cut documents: passages that, pasted into a prompt, are found as they are.

A stack is named with its sizes, as `langchain:1000:200`. Passages are spans of the document's text.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence

from jaxrag.base.errors import ConfigError
from jaxrag.models.text.delimiters import Span
from jaxrag.models.text.passage_rules import PassageRules
from jaxrag.models.text.passages import passage_blocks

Splitter = Callable[[str, int, int], Sequence[Span]]  # of a text, a size and an overlap

_SEPARATORS = ("\n\n", "\n", " ")  # then characters


@dataclasses.dataclass(frozen=True)
class Stack:
    """How a stack cuts documents, and whether its prompts part what it pastes.

    Attributes:
      split: cuts a text.
      size: of a passage, in ``unit``; the stack's own setting.
      overlap: that two passages share.
      unit: what both count.
      parted: something stands between the passages of its prompts beside empty lines.
    """

    split: Splitter
    size: int
    overlap: int
    unit: str
    parted: bool


def by_characters(text: str, size: int, overlap: int) -> list[Span]:
    """LangChain's ``RecursiveCharacterTextSplitter``: empty lines, lines, words, characters.

    Pieces are joined up to ``size`` characters; a longer one is cut by the next separator.
    """
    return _recursive(text, (0, len(text)), _SEPARATORS, size, overlap)


def _recursive(
    text: str, span: Span, separators: Sequence[str], size: int, overlap: int
) -> list[Span]:
    while separators and text.find(separators[0], *span) < 0:
        separators = separators[1:]
    spans, short = list[Span](), list[Span]()
    for piece in _begun(text, span, separators[0] if separators else ""):
        if piece[1] - piece[0] < size:
            short.append(piece)
            continue
        spans += _joined(text, short, size, overlap)
        short = []
        if separators:
            spans += _recursive(text, piece, separators[1:], size, overlap)
        else:
            spans.append(piece)
    return spans + _joined(text, short, size, overlap)


def _begun(text: str, span: Span, separator: str) -> Iterator[Span]:
    """The parts of a text that a separator begins; its characters where it is empty."""
    start, end = span
    if not separator:
        yield from ((at, at + 1) for at in range(start, end))
        return
    at = text.find(separator, start, end)
    while at >= 0:
        if at > start:
            yield start, at
        start, at = at, text.find(separator, at + len(separator), end)
    if end > start:
        yield start, end


def _joined(text: str, pieces: Sequence[Span], size: int, overlap: int) -> list[Span]:
    """Neighbours joined up to ``size`` characters, without white space at their edges."""
    spans = list[Span]()
    first = 0
    for at, (_, end) in enumerate(pieces):
        if at > first and end - pieces[first][0] > size:
            spans += _stripped(text, (pieces[first][0], pieces[at][0]))
            while first < at and (
                pieces[at][0] - pieces[first][0] > overlap or end - pieces[first][0] > size
            ):
                first += 1
    if first < len(pieces):
        spans += _stripped(text, (pieces[first][0], pieces[-1][1]))
    return spans


def _stripped(text: str, span: Span) -> list[Span]:
    inside = text[span[0] : span[1]]
    if not (body := inside.strip()):
        return []
    start = span[0] + inside.index(body)
    return [(start, start + len(body))]


def by_words(text: str, size: int, overlap: int) -> list[Span]:
    """Haystack's ``DocumentSplitter``: so many words, each with the space behind it."""
    ends = [match.end() for match in re.finditer(r" |(?<! )\Z", text)]
    starts = [0, *ends[:-1]]
    found = list[Span]()
    for first in range(0, max(1, len(starts) - overlap), size - overlap):
        last = min(first + size, len(starts)) - 1
        found += _stripped(text, (starts[first], ends[last]))
    return found


def by_sentences(text: str, size: int, overlap: int) -> list[Span]:
    """LlamaIndex's ``SentenceSplitter``, which has to be installed, as it counts other tokens.

    Raises ConfigError where it is not.
    """
    try:
        from llama_index.core.node_parser import SentenceSplitter
    except ImportError:
        raise ConfigError(
            "cutting as llamaindex does needs its splitter: pip install llama-index-core"
        ) from None
    found = list[Span]()
    at = 0
    for passage in SentenceSplitter(chunk_size=size, chunk_overlap=overlap).split_text(text):
        start = text.find(passage, at)
        if start >= 0:
            found.append((start, start + len(passage)))
            at = start + 1
    return found


STACKS: dict[str, Stack] = {
    "langchain": Stack(by_characters, 1000, 200, "characters", parted=False),
    "open-webui": Stack(by_characters, 1000, 100, "characters", parted=True),
    "anythingllm": Stack(by_characters, 1000, 20, "characters", parted=True),
    "haystack": Stack(by_words, 200, 0, "words", parted=False),
    "llamaindex": Stack(by_sentences, 1024, 200, "tokens", parted=True),
}


def stack_named(name: str) -> Stack:
    """A stack by its name, with its own sizes or those that follow: ``langchain:1000:200``.

    Raises ConfigError.
    """
    kind, *sizes = name.split(":")
    if kind not in STACKS or len(sizes) > 2 or not all(it.isdecimal() for it in sizes):
        raise ConfigError(
            f"stack {name!r}: expected one of {', '.join(STACKS)}, alone or with size and overlap "
            "as langchain:1000:200"
        )
    stack = STACKS[kind]
    size = int(sizes[0]) if sizes else stack.size
    overlap = int(sizes[1]) if len(sizes) == 2 else (0 if sizes else stack.overlap)
    if not 0 <= overlap < size:
        raise ConfigError(
            f"stack {name!r}: expected an overlap of 0 to {size - 1} {stack.unit}, less than the "
            "size"
        )
    return dataclasses.replace(stack, size=size, overlap=overlap)


def stack_blocks(text: str, stack: Stack | None, rules: PassageRules) -> list[Span]:
    """What prompts with passages of this text have as blocks, in order, each once.

    Args:
      text: of a document.
      stack: what cuts it into passages and pastes them; None: it is pasted whole, as files are.
      rules: of the server that reads the prompts.
    """
    if stack is None:
        return passage_blocks(text, rules, parted=True)
    found = dict[Span, None]()
    for start, end in stack.split(text, stack.size, stack.overlap):
        inside = passage_blocks(text[start:end], rules, stack.parted)
        found |= dict.fromkeys((start + first, start + last) for first, last in inside)
    return sorted(found)
