r"""What to encode for an engine whose prompts the store lacked: the parts of prompts that it noted.

An engine's stored parts stand at the beginning of a prompt, one behind the other. So a prompt with
pasted passages is parts up to the last of these, and what stands around them is parts, too:

    Use these.\n[1] Otters eat fish ...\n[2] Bees fly ...\nWhy do otters ...
    `-------------'~~~~~~~~~~~~~~~~~~~`----'~~~~~~~~~~~~~~~`---------------
         part            part        part       part         computed
"""

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from jaxrag.base.errors import StoreError
from jaxrag.base.types import HostArray
from jaxrag.connectors.manifest import FIRST, Manifest
from jaxrag.connectors.plan import ISOLATED, Planner
from jaxrag.connectors.prompt_log import FILE
from jaxrag.models.text.passage_rules import PassageRules
from jaxrag.models.text.tokenizer import Tokenizer
from jaxrag.serve.plain import text_pieces


@dataclasses.dataclass(frozen=True)
class LoggedPrompt:
    """A prompt as an engine noted it.

    Attributes:
      ids: of it, int32 [T].
      spans: tokens of each part, where its client named them; else None.
    """

    ids: HostArray
    spans: tuple[int, ...] | None


def read(folder: Path, tokenizer: str) -> Iterator[LoggedPrompt]:
    """The prompts that were noted with the tokenizer of this digest, in their order.

    Raises StoreError for a file that cannot be read or is not as it was written.
    """
    path = folder / FILE
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(
            f"{path}: cannot be read ({error.strerror}); run this as the user that vLLM runs as"
        ) from None
    for number, line in enumerate(lines, 1):
        try:
            fields = json.loads(line)
            ids, spans = np.array(fields["ids"], np.int32), fields["spans"]
            if ids.ndim != 1 or not len(ids) or ids.min() < 0:
                raise ValueError("expected token ids")
            if spans is not None and not all(type(span) is int and span > 0 for span in spans):
                raise ValueError("expected numbers of tokens")
            if fields["tokenizer"] == tokenizer:
                yield LoggedPrompt(ids, None if spans is None else tuple(spans))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise StoreError(
                f"{path}, line {number}: is damaged ({error}); take the line out or delete the file"
            ) from None


def lacking(
    known: Manifest,
    prompts: Iterable[LoggedPrompt],
    tokenizer: Tokenizer,
    rules: PassageRules | None,
) -> dict[str, HostArray]:
    """The parts of prompts that would have to be stored for them: int32 [T] by content id.

    Those of their spans; without these, passages that ``rules`` find in the text, and what stands
    in front of passages and of stored parts. Nothing of a prompt that does not begin with the
    prefix that the stored chunks have seen.

    Args:
      known: whose parts are stored.
      prompts: that were noted.
      tokenizer: of the prompts.
      rules: how pasted passages are found; None: none is looked for.
    """
    planner = Planner(known)
    parts = (part for ids in prompts for part in _lacking(known, planner, ids, tokenizer, rules))
    return {planner.content(part): part for part in parts}


def _lacking(
    known: Manifest,
    planner: Planner,
    prompt: LoggedPrompt,
    tokenizer: Tokenizer,
    rules: PassageRules | None,
) -> Iterator[HostArray]:
    ids, prefix = prompt.ids, known.prefix
    led = len(prefix) > 0 and np.array_equal(ids[: len(prefix)], prefix)
    if len(prefix) and not led and known.engine.encoder != ISOLATED:
        return
    if prompt.spans is not None:
        at = 0
        for length in prompt.spans:
            if at + length >= len(ids):
                return
            is_prefix = led and not at and length == len(prefix)
            part = ids[at : at + length]
            if not is_prefix and not planner.holds(planner.content(part)):
                yield part
            at += length
        return
    stored = list(_stored(planner, ids, len(prefix) if led else 0))
    edges = [len(prefix) if led else 0, *itertools.chain(*stored), len(ids)]
    gaps = list(zip(edges[::2], edges[1::2], strict=True))
    passages = []
    if rules is not None:
        passages = [
            (start + first, start + last)
            for start, end in gaps
            for first, last in _passages(ids[start:end], tokenizer, rules, asks=end == len(ids))
        ]
        if sum(last - first for first, last in (*stored, *passages)) < rules.worth:
            passages = []
    at = edges[0]
    for first, last in sorted((*stored, *passages)):
        if at < first:
            yield ids[at:first]
        if (first, last) not in stored:
            yield ids[first:last]
        at = last


def _stored(planner: Planner, ids: HostArray, at: int) -> Iterator[tuple[int, int]]:
    """First and one past the last token of the stored parts anywhere in a prompt, ascending.

    Those of fewer than FIRST tokens may stand there by chance.
    """
    while at < len(ids):
        plan = planner.longest(ids, at)
        if plan is None or plan[1] < FIRST:
            at += 1
            continue
        yield at, at + plan[1]
        at += plan[1]


def _passages(
    ids: HostArray, tokenizer: Tokenizer, rules: PassageRules, *, asks: bool
) -> Iterator[tuple[int, int]]:
    """First and one past the last token of the passages in a text, ascending.

    A token that has letters of a passage and of what stands around it is none of the passage.
    """
    if not len(ids):
        return
    stream = tokenizer.stream(skip_special=False)
    texts = [stream.push(int(token)) for token in ids]
    texts[-1] += stream.flush()
    ends = np.cumsum([len(text) for text in texts])
    firsts = ends - [len(text.lstrip()) for text in texts]
    lasts = ends - [len(text) - len(text.rstrip()) for text in texts]
    for piece in text_pieces("".join(texts), rules, asks):
        inside = np.flatnonzero((firsts >= piece.start) & (lasts <= piece.end) & (firsts < lasts))
        if piece.block and len(inside):
            yield int(inside[0]), int(inside[-1]) + 1
