"""Specs by name and table, and the bank of training queries."""

import ml_dtypes
import numpy as np
import pytest
from refusal import refused

from jaxrag.base.config import Llama3Scaling, RopeConfig, YarnScaling
from jaxrag.base.errors import ConfigError, RequestError, RetrievalError
from jaxrag.models import rope
from jaxrag.reuse.attention_index import (
    INDEXES,
    Exact,
    Ivf,
    ProjectedGraph,
    QueryBank,
    QueryLists,
    name_of,
    rotated,
    spec_from,
    spread,
    table_of,
)

PLAIN = RopeConfig(10000.0, 16, False, None)


@pytest.mark.parametrize("name", INDEXES)
def test_a_spec_is_its_table(name):
    spec = spec_from(name)
    assert name_of(spec) == name
    assert spec_from(table_of(spec)) == spec
    assert hash(spec) == hash(spec_from(name))


def test_a_table_changes_fields():
    assert spec_from({"kind": "lists", "clusters": 9}) == QueryLists(clusters=9)
    with refused(ConfigError, "kind='tree'"):
        spec_from("tree")
    with refused(ConfigError, "'depth'"):
        spec_from({"kind": "graph", "depth": 3})


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (ProjectedGraph, "degree", 0),
        (ProjectedGraph, "degree", 7),
        (ProjectedGraph, "ef", 1.5),
        (ProjectedGraph, "share", "all"),
        (QueryLists, "clusters", None),
        (QueryLists, "exact_below", -1),
        (Ivf, "clusters", 0),
        (Exact, "storage", "int4"),
    ],
)
def test_a_field_out_of_range_is_named(kind, field, value):
    with refused(ConfigError, field):
        kind(**{field: value})


def test_a_graph_without_links_is_refused():
    with refused(ConfigError, "span=0"):
        ProjectedGraph(span=0, top=0)


@pytest.mark.parametrize(
    "config",
    [
        PLAIN,
        RopeConfig(5e5, 8, True, None),
        RopeConfig(5e5, 16, False, Llama3Scaling(8.0, 1.0, 4.0, 64)),
        RopeConfig(1e4, 12, False, YarnScaling(4.0, 64, 32.0, 1.0, 1.4, True)),
    ],
)
def test_rotation_is_that_of_the_model(config):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 16)).astype(np.float32)
    positions = np.array([0, 3, 90, 17, 1000])
    table = rope.rope_table(config, 1001)
    expected = rope.place(x.swapaxes(0, 1), positions, table, config)
    np.testing.assert_allclose(
        rotated(x, positions, config), np.asarray(expected).swapaxes(0, 1), atol=1e-5
    )


def test_a_bank_rotates_its_queries():
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((3, 10, 16)).astype(ml_dtypes.bfloat16)
    bank = QueryBank(queries, np.arange(7, 107, 10, dtype=np.int32))
    own = rotated(bank.queries.astype(np.float32), bank.positions, PLAIN)
    np.testing.assert_array_equal(bank.own(PLAIN), own)
    np.testing.assert_array_equal(bank.at(PLAIN, 0), bank.queries.astype(np.float32))
    np.testing.assert_array_equal(bank.at(PLAIN, 50)[:, 2], bank.at(PLAIN, np.full(10, 50))[:, 2])


def test_a_bank_that_cannot_be():
    queries = np.zeros((2, 5, 16), np.float32)
    with refused(RetrievalError, "4"):
        QueryBank(queries, np.zeros(4, np.int32))
    with refused(RetrievalError, "2"):
        QueryBank(queries[:, :0], np.zeros(0, np.int32))


@pytest.mark.parametrize("logarithmic", [False, True])
def test_a_spread_covers_its_range(logarithmic):
    positions = spread(512, 1000, 33000, logarithmic=logarithmic)
    assert positions.dtype == np.int32
    assert positions.shape == (512,)
    assert positions.min() >= 1000
    assert positions.max() < 33000
    edges = np.geomspace(1, 32000, 9) if logarithmic else np.linspace(1, 32000, 9)
    counts, _ = np.histogram(positions - 999, edges)
    assert counts.min() >= 40
    assert np.abs(np.diff(positions.astype(int))).mean() > 3000
    assert spread(3, 5, 6).tolist() == [5, 5, 5]
    with refused(RequestError, "3"):
        spread(3, 6, 6)
