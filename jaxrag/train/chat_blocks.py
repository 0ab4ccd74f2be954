"""Cutting dialogue into blocks, as Block-Attention's training does with general instruction data.

The paper trains RAG samples together with dialogue (section 2.4); its released data code cuts the
prompt of a dialogue at the first separator it holds and joins the smallest neighbours again.
"""

import itertools
from collections.abc import Sequence

SEPARATORS = ("\n\n", "---", "===", "\n\t", "\n")
MAX_BLOCKS = 14  # "fewer than 15"
LONG_DIALOGUE = 12  # messages from which on each is a block of its own


def split_chat(messages: Sequence[str]) -> list[str]:
    """Blocks of a prompt, whose concatenation is the prompt; the last one is global.

    ``messages`` are the prompt texts of the turns, the last one the user's question. A single turn
    is cut itself; of several, the last is the global block and those before it are cut.
    """
    if len(messages) == 1:
        return _merge(_cut(messages[0]), MAX_BLOCKS)
    *before, question = messages
    if len(messages) >= LONG_DIALOGUE:
        return [*before, question]
    return [*_merge(_cut("".join(before)), MAX_BLOCKS - 1), question]


def _cut(text: str) -> list[str]:
    """Pieces of a text, each with the separator that ends it."""
    for separator in SEPARATORS:
        *closed, last = text.split(separator)
        if closed:
            pieces = [piece + separator for piece in closed]
            return [*pieces, last] if last else pieces
    return [text]


def _merge(pieces: list[str], most: int) -> list[str]:
    """Join the two neighbours that are smallest together until at most ``most`` are left.

    Pieces of white space alone are no blocks: they join the piece before them.
    """
    blocks: list[str] = []
    for piece in pieces:
        if blocks and not (piece.strip() and blocks[-1].strip()):
            blocks[-1] += piece
        else:
            blocks.append(piece)
    while len(blocks) > most:
        sizes = [len(a) + len(b) for a, b in itertools.pairwise(blocks)]
        at = sizes.index(min(sizes))
        blocks[at : at + 2] = [blocks[at] + blocks[at + 1]]
    return blocks
