"""Thoughts in an answer: what a model writes before ``</think>``."""

import dataclasses

from jaxrag.serve.answers import Result
from jaxrag.serve.output import overlap
from jaxrag.serve.questions import ReadyQuestion

_OPEN, _CLOSE = "<think>", "</think>"
_TAIL = 32  # tokens of a prompt in which a thought is begun


def thinks(question: ReadyQuestion) -> bool | None:
    """Whether its answer begins in the middle of a thought; None where it can hold none."""
    tokenizer = question.settings.model.tokenizer
    if tokenizer is None or question.sampling.guide is not None:
        return None
    if not any(_CLOSE in template for template in tokenizer.chat_templates.values()):
        return None
    _, begun, rest = tokenizer.decode(question.prompt.final[-_TAIL:], False).rpartition(_OPEN)
    return bool(begun) and not rest.strip()


def thought_of(text: str, begun: bool | None, ended: bool = True) -> tuple[str, int]:
    """What an answer thinks, and at which of its characters it speaks.

    Args:
      begun: as ``thinks`` says it.
      ended: nothing follows; else what may still be another thing is left out.
    """
    if begun is None:
        return "", 0
    start = 0
    if not begun:
        start = len(text) - len(text.lstrip())
        if not text.startswith(_OPEN, start):
            return "", len(text) if not ended and _OPEN.startswith(text[start:]) else 0
        start += len(_OPEN)
    end = text.find(_CLOSE, start)
    if end < 0:
        held = 0 if ended else overlap(text, _CLOSE)
        return text[start : len(text) - held].strip("\n"), len(text)
    at = end + len(_CLOSE)
    return text[start:end].strip("\n"), at + len(text[at:]) - len(text[at:].lstrip("\n"))


def spoken(result: Result, begun: bool | None) -> tuple[str, Result]:
    """What an answer thinks, and the answer without it."""
    thought, at = thought_of(result.text, begun)
    cited = [
        dataclasses.replace(citation, start=citation.start - at, end=citation.end - at)
        for citation in result.citations
        if citation.start >= at
    ]
    return thought, dataclasses.replace(result, text=result.text[at:], citations=cited)
