import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrag.kv.store.quantise import dequantise, quantise

FLOATS = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)


def restored(kv):
    elements, scale = quantise(kv)
    out = np.full(kv.shape, np.nan, kv.dtype)
    for layer in range(len(kv)):
        dequantise(elements[layer], scale[layer], out[layer])
    return elements, scale, out


@settings(deadline=None, max_examples=100)
@given(hnp.arrays(np.float32, st.tuples(*[st.integers(1, 4)] * 5), elements=FLOATS))
def test_an_element_comes_back_within_half_a_scale(kv):
    elements, scale, out = restored(kv)
    assert elements.dtype == np.int8
    assert scale.dtype == np.float32
    assert scale.shape == kv.shape[:-1]
    assert elements.min() >= -127
    wide = kv.astype(np.float64)
    bound = scale.astype(np.float64)[..., None] * 0.5 * (1 + 1e-4)
    assert (np.abs(out.astype(np.float64) - wide) <= bound).all()
    # The largest of a row keeps its sign and, up to rounding, its value.
    assert np.allclose(np.abs(out).max(-1), np.abs(kv).max(-1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_values_are_those_of_the_definition(dtype):
    rng = np.random.default_rng(0)
    kv = rng.standard_normal((2, 2, 9000, 2, 8)).astype(np.dtype(dtype))  # several blocks
    elements, scale, out = restored(kv)
    wide = kv.astype(np.float32)
    expected_scale = np.abs(wide).max(-1) / np.float32(127)
    assert (scale == expected_scale).all()
    expected = np.rint(wide / scale[..., None])
    assert (elements == expected).all()
    assert out.tobytes() == (elements * scale[..., None]).astype(kv.dtype).tobytes()


def test_zeros_and_the_smallest_numbers():
    kv = np.zeros((1, 2, 1, 1, 4), np.float32)
    kv[0, 1, 0, 0, 2] = np.finfo(np.float32).smallest_subnormal
    elements, scale, out = restored(kv)
    assert not elements.any()
    assert not scale.any()
    assert not out.any()


def test_strided_arrays():
    kv = np.random.default_rng(1).standard_normal((1, 2, 6, 4, 8)).astype(np.float32)
    elements, scale = quantise(kv)
    wide = np.zeros((2, 12, 4, 8), np.float32)
    dequantise(elements[0, :, 2:5, ::2], scale[0, :, 2:5, ::2], wide[:, 3:6, 1:3])
    assert (wide[:, 3:6, 1:3] == (elements * scale[..., None])[0, :, 2:5, ::2]).all()
    wide[:, 3:6, 1:3] = 0
    assert not wide.any()
