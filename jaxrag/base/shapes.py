"""Sizes that are compiled once and reused: powers of two, and the pieces of a long prefill."""

QUESTION_WIDTHS = (48, 80)  # tokens; on a CPU 80 is 1.3 times faster than 128, 96 hardly
_BETWEEN = (192, 384)  # tokens


def bucket(size: int, smallest: int = 16) -> int:
    """The next power of two that holds ``size``: shapes that are compiled once and reused."""
    return max(smallest, 1 << max(size - 1, 0).bit_length())


def bucket_below(size: int) -> int:
    """The largest power of two that is not above ``size``; 1 for less than that."""
    return 1 << (max(size, 1).bit_length() - 1)


def pieces(length: int, largest: int) -> list[tuple[int, int]]:
    """Split a prefill of ``length`` tokens into (tokens, width) pieces of few distinct widths.

    Widths are powers of two up to ``largest``, 48 and 80, as most questions behind stored chunks
    are about that long and their attention is most of the work, and 192 and 384, for what stands
    between pasted passages. From 512 on also 64 or 128 more than a power of two: a prompt is often
    a round number of chunk tokens and a short question, and a pass of its own for the question
    would read every weight again. At most 64 tokens or an eighth are padding.
    """
    out = []
    while length > 0:
        power = bucket(length)
        between = [size for size in (*QUESTION_WIDTHS, *_BETWEEN) if size < power]
        width = min(min((size for size in between if length <= size), default=power), largest)
        if width > length > 128 and width - length > max(64, length // 8):
            width = max(size for size in (power // 2, *between) if size <= length)
        rest = length - width
        if width >= 512 and 0 < rest <= 128:
            width += 64 if rest <= 64 else 128
        out.append((min(width, length), width))
        length -= width
    return out


def row_length(used: int) -> int:
    """A width that few programs are compiled for, with at most 255 tokens of padding beyond 512."""
    return bucket(used, 128) if used <= 512 else -(-used // 256) * 256
