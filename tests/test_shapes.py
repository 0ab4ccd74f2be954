"""Sizes that are compiled for: powers of two above and below a number, and pieces."""

import pytest

from jaxrag.base.shapes import QUESTION_WIDTHS, bucket, bucket_below, pieces, row_length


@pytest.mark.parametrize("size", range(70))
def test_powers_of_two_on_both_sides(size):
    powers = [1 << n for n in range(8)]
    assert bucket(size, 1) == min(power for power in powers if power >= size)
    assert bucket(size) == max(bucket(size, 1), 16)
    assert bucket_below(size) == max([power for power in powers if power <= size], default=1)


@pytest.mark.parametrize(
    ("used", "width"), [(1, 128), (129, 256), (512, 512), (513, 768), (1024, 1024), (1025, 1280)]
)
def test_rows_are_padded_by_little(used, width):
    assert row_length(used) == width


@pytest.mark.parametrize("length", [*range(1, 300), 511, 513, 560, 1023, 1024, 1025, 4000])
def test_pieces_cover_a_prompt_in_few_widths(length):
    cut = pieces(length, 1024)
    powers = [16 << n for n in range(7)]
    joined = {power + more for power in powers if power >= 512 for more in (64, 128)}
    assert sum(tokens for tokens, _ in cut) == length
    assert {width for _, width in cut} <= {*powers, *QUESTION_WIDTHS, *joined}
    padding = sum(width - tokens for tokens, width in cut)
    assert padding <= max(length // 8, 47)  # 81 tokens run as 128
