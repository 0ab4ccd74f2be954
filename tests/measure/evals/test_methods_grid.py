"""Which cells are measured, and what is refused before any work."""

import pytest
from refusal import refused

from jaxrag.base.errors import JaxragError
from jaxrag.measure.evals.methods_grid import RANDOM, cells_of
from jaxrag.measure.evals.options import MethodsOptions
from jaxrag.reuse.methods import METHODS


def shown(options):
    return [(cell.name, cell.method.encoder, cell.ratio) for cell in cells_of(options)]


def test_methods_encoders_and_ratios_are_crossed():
    options = MethodsOptions("m", ("turborag", "fusionrag", "epic"), ratios=(0.0, 0.3))
    assert shown(options) == [
        ("full_attention", None, None),
        ("full_reuse", "after_prefix", None),
        ("full_reuse", "neighbours", None),
        ("turborag", "isolated", None),
        ("fusionrag", "after_prefix", 0.0),
        ("fusionrag", "after_prefix", 0.3),
        ("fusionrag", "neighbours", 0.0),
        ("fusionrag", "neighbours", 0.3),
        ("epic", "isolated", None),  # its own budget
        ("epic", "isolated", 0.0),
        ("epic", "isolated", 0.3),
    ]


def test_a_method_with_a_budget_of_its_own_is_measured_at_it():
    cells = cells_of(MethodsOptions("m", ("cache_craft", "epic", "cacheblend"), ratios=(0.3,)))
    own = [c for c in cells if c.ratio is None and c.method.recomputes]
    assert [(c.name, c.method.encoder) for c in own] == [
        ("cache_craft", "after_prefix"),
        ("cache_craft", "neighbours"),
        ("epic", "isolated"),
    ]
    assert own[2].served.selector == METHODS["epic"].selector


def test_behind_neighbours_the_first_chunk_stands_behind_the_prefix():
    cells = cells_of(MethodsOptions("m", ("cacheblend",), ratios=(0.1,)))
    firsts = {cell.method.encoder: cell.method.first_encoder for cell in cells}
    assert firsts["neighbours"] == "after_prefix" and firsts["after_prefix"] is None


def test_own_encoders_are_those_of_the_presets():
    options = MethodsOptions(
        "m", ("fusionrag", "random", "full_attention"), ratios=(0.15,), encoders=()
    )
    assert shown(options)[2:] == [
        ("fusionrag", "neighbours", 0.15),
        ("random", "after_prefix", 0.15),
    ]
    assert cells_of(options)[2].method == METHODS["fusionrag"]
    assert cells_of(options)[3].method == RANDOM


def test_cells_that_give_the_same_answers_are_served_once():
    cells = cells_of(MethodsOptions("m", ("cacheblend", "cache_craft", "random")))
    served = {(cell.name, cell.method.encoder, cell.ratio): cell.served for cell in cells}
    for ratio in (0.0, 1.0):
        one = {
            served[name, "neighbours", ratio] for name in ("cacheblend", "cache_craft", "random")
        }
        assert len(one) == 1
    assert served["random", "after_prefix", 0.0] == served["full_reuse", "after_prefix", None]
    assert served["random", "after_prefix", 0.0] != served["random", "neighbours", 0.0]
    assert len({served[name, "neighbours", 0.3] for name in ("cacheblend", "random")}) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"methods": ("fusion",)}, "'fusion'"),
        ({"methods": ("epic", "epic")}, "each once"),
        ({"ratios": (0.1, 0.1)}, "each once"),
        ({"ratios": ()}, "no recompute ratio"),
        ({"ratios": (1.5,)}, "recompute_ratio=1.5"),
        ({"methods": ("turborag",), "ratios": (0.1,)}, "none of the methods recomputes"),
        ({"encoders": ("isolated",)}, "--encoder isolated"),
        ({"encoders": ("beside",)}, "'beside'"),
        ({"questions": 0}, "--num-questions 0"),
        ({"batch_size": 0}, "--batch-size 0"),
        ({"neighbours": 0}, "--neighbours 0"),
        ({"retrieve": 0}, "--retrieve 0: expected 1 to 6"),
        ({"retrieve": 7}, "--retrieve 7: expected 1 to 6"),
    ],
)
def test_nonsense_is_refused(changes, words):
    with pytest.raises(JaxragError) as caught:
        cells_of(MethodsOptions(**{"model": "m", "methods": ("fusionrag",), **changes}))
    assert words in str(caught.value)


def test_two_methods_of_one_name_are_refused(tmp_path):
    (tmp_path / "epic.toml").write_text(
        'encoder = "isolated"\nselector = {name = "first_k", k = 3}\n'
    )
    with refused(JaxragError, "'epic'"):
        cells_of(MethodsOptions("m", ("epic", str(tmp_path / "epic.toml"))))
