"""Sizes that are compiled for: powers of two above and below a number."""

import pytest

from jaxrag.base.shapes import bucket, bucket_below, pieces, row_length


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


def test_pieces_of_a_long_prompt_are_few_shapes():
    shapes = set()
    for length in range(1, 6000):
        parts = pieces(length, 2048)
        assert sum(n for n, _ in parts) == length
        assert all(n <= width for n, width in parts)
        padding = sum(width for _, width in parts) - length
        assert padding <= max(64, length // 8)
        shapes |= {width for _, width in parts}
    powers = {16, 32, 64, 128, 256, 512, 1024, 2048}
    assert shapes == powers | {48, 80, 192, 384} | {
        n + more for n in (512, 1024, 2048) for more in (64, 128)
    }
    assert pieces(562, 2048) == [(562, 576)]
    assert pieces(4146, 2048) == [(2048, 2048), (2098, 2112)]
