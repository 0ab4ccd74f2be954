"""Frozen dataclasses that are pytrees, as those of Flax are."""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrag.base import struct
from jaxrag.base.types import Array


class Inner(struct.PyTreeNode):
    cos: Array
    sin: Array


class Outer(struct.PyTreeNode):
    table: Inner
    name: str = struct.static()
    bias: Array | None


class FlaxInner(flax.struct.PyTreeNode):
    cos: Any
    sin: Any


class FlaxOuter(flax.struct.PyTreeNode):
    table: Any
    name: str = flax.struct.field(pytree_node=False)
    bias: Any


OURS = Outer(Inner(jnp.zeros(2), jnp.ones(3)), "one", None)
THEIRS = FlaxOuter(FlaxInner(jnp.zeros(2), jnp.ones(3)), "one", None)


def test_leaves_and_their_paths_are_those_of_flax():
    ours, theirs = (jax.tree_util.tree_leaves_with_path(tree) for tree in (OURS, THEIRS))
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    assert len(ours) == 2
    for (_, one), (_, other) in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_static_field_is_compiled_for():
    seen = []

    @jax.jit
    def double(node: Outer) -> Outer:
        seen.append(node.name)
        return jax.tree.map(lambda x: 2 * x, node)

    first = double(OURS)
    double(first)
    second = double(OURS.replace(name="two"))
    assert seen == ["one", "two"]
    assert (type(first), first.name, second.name) == (Outer, "one", "two")
    np.testing.assert_array_equal(first.table.sin, [2, 2, 2])


def test_it_is_frozen_and_replaced():
    with pytest.raises(dataclasses.FrozenInstanceError):
        OURS.name = "other"
    assert OURS.replace(bias=3).bias == 3
    assert OURS.bias is None
    with pytest.raises(TypeError):
        OURS.replace(foreign=1)
