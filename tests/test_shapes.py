"""Sizes that are compiled for: powers of two above and below a number."""

import pytest

from jaxrag.base.shapes import bucket, bucket_below, row_length


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
