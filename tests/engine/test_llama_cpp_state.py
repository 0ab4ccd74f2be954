"""The states of llama.cpp: written here as it writes them, taken apart and put together again."""

import struct

import numpy as np
import pytest

from jaxrag.base.llama_cpp.state import StateError, StateForm

MAGIC, F16, Q8 = 0x67676A6D, 1, 8


def rows(seed, layers, cells, size):
    return np.random.default_rng(seed).integers(0, 256, (layers, cells, size), np.uint8)


def part(places, k, v, *, kind=F16, element=0, streams=1):
    """One cache: its cells, then K and V [layers, cells, row]."""
    state = struct.pack("=II", streams, len(places))
    state += b"".join(struct.pack("=iIi", place, 1, 9) for place in places)
    state += struct.pack("=II", bool(element), len(k))
    for layer in k:
        state += struct.pack("=iQ", kind, layer.shape[1]) + layer.tobytes()
    for layer in v:
        size = layer.shape[1]
        if element:
            columns = layer.reshape(len(places), size // element, element).swapaxes(0, 1)
            state += struct.pack("=iII", kind, element, size // element) + columns.tobytes()
        else:
            state += struct.pack("=iQ", kind, size) + layer.tobytes()
    return state


def state(*parts):
    return struct.pack("=Ii", MAGIC, 9) + b"".join(parts)


@pytest.mark.parametrize(("kind", "element"), [(F16, 2), (Q8, 0)])
def test_kv_comes_out_and_goes_back(kind, element):
    def of(tokens, first, seed):
        k, v = rows(seed, 3, tokens, 8), rows(seed + 1, 3, tokens, 8)
        places = range(first, first + tokens)
        return k, v, state(part(places, k, v, kind=kind, element=element))

    form = StateForm.learn(of(2, 0, 1)[2], 0)
    assert (form.layers, form.row) == (3, 8)
    k, v, whole = of(5, 7, 3)
    kv = form.taken(whole)
    assert np.array_equal(kv, np.stack([k, v], 1))
    assert form.joined(kv, 7, 9).tobytes() == whole
    moved = form.joined(kv, 40, 9)
    assert np.array_equal(form.taken(moved), kv) and moved.tobytes() != whole


def test_a_local_layer_keeps_what_its_window_leaves():
    def of(tokens, first, seed):
        k, v = rows(seed, 3, tokens, 4), rows(seed + 1, 3, tokens, 4)
        places = list(range(first, first + tokens))
        left = slice(max(tokens - 3, 0), None)
        local = part(places[left], k[1:, left], v[1:, left], element=2)
        return np.stack([k, v], 1), state(part(places, k[:1], v[:1], element=2), local)

    form = StateForm.learn(of(2, 0, 1)[1], 3)
    kv, whole = of(5, 4, 5)
    taken = form.taken(whole)
    assert np.array_equal(taken[:1], kv[:1]) and np.array_equal(taken[1:, :, 2:], kv[1:, :, 2:])
    assert not taken[1:, :, :2].any()  # no token behind the chunk sees these
    assert form.joined(taken, 4, 9).tobytes() == whole


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda k: state(part([0, 1], k, k, streams=2)), "in another way"),
        (lambda k: state(part([0, 1], k, rows(2, 1, 2, 6))), "in another way"),
        (lambda k: state(part([0, 1], k, k))[:-3], "has 85 bytes"),
        (lambda k: state(part([0, 1], k, k), part([0, 1], *[rows(3, 1, 2, 6)] * 2)), "sizes"),
        (lambda k: state(*[part([0, 1], k, k)] * 3), "sizes"),
        (lambda k: state(part([0, 2], k, k)), "come back"),
    ],
)
def test_another_layout_is_refused(made, why):
    with pytest.raises(StateError, match=why):
        StateForm.learn(made(rows(1, 1, 2, 4)), 0)


def test_a_state_that_is_cut_is_refused():
    k = rows(1, 2, 2, 4)
    form = StateForm.learn(state(part([0, 1], k, k)), 0)
    with pytest.raises(StateError, match="a state of 2 tokens has"):
        form.taken(state(part([0, 1], k, k))[:-1])
