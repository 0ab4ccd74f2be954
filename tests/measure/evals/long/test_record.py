"""The figures of the long-context weights in benchmarks/results/: whose they are, what they say."""

import json
from pathlib import Path

import pytest

from jaxrag.measure.evals.long.report import tables
from jaxrag.models.digest import weights_digest
from jaxrag.tasks.long.tasks import SUITES

ROOT = Path(__file__).parents[4]
WEIGHTS = ROOT / "checkpoints" / "synthetic-0.8m" / "long"
RESULTS = ROOT / "benchmarks" / "results"
SINK, RECENT = 4, 64
DENSE, WINDOW = "full_attention, dense", "full_attention, window"
KCACHE = ("full_attention, kcache", "full_attention, renormalised")
COMPARED = {
    "needle": {"retrieval", "kcache", "renormalised"},
    "infinitebench": {"retrieval", "kcache", "renormalised"},
}
RULES = {
    "dense": "dense",
    "window": f"static_window:sink={SINK},recent={RECENT}",
    "retrieval": f"retrieval:k=100,sink={SINK},recent={RECENT}",
    "kcache": "topn:n=128",
    "renormalised": "topn:n=128,renormalise=true",
}


@pytest.fixture(params=["needle", "infinitebench"])
def record(request):
    """What `jaxrag eval needle|infinitebench` wrote of these weights."""
    text = (RESULTS / f"long-{request.param}.json").read_text(encoding="utf-8")
    return json.loads(text)


def test_the_record_is_of_these_weights_and_complete(record):
    assert record["model"]["weights"] == weights_digest(WEIGHTS)
    wanted = {"dense", "window"} | COMPARED[record["suite"]]
    assert {name: record["decode"].get(name) for name in wanted} == {
        name: RULES[name] for name in wanted
    }
    assert record["split"] == "test" and record["flavour"] == "village"
    assert set(record["tasks"]) == set(SUITES[record["suite"], "village"])
    assert min(cell["score"]["n"] for cell in record["cells"]) >= 100


def test_rules_that_look_at_what_matters_answer_as_dense_does(record):
    longest = max(record["lengths"])
    dense = {c["task"]: c["score"]["value"] for c in record["cells"]
             if (c["method"], c["length"]) == (DENSE, longest)}  # fmt: skip
    assert min(dense.values()) >= 0.9
    methods = [f"full_attention, {name}" for name in COMPARED[record["suite"]]]
    compared = [c for c in record["differences"]
                if c["length"] == longest and c["method"] in methods]  # fmt: skip
    assert len(compared) == len(methods) * len(record["tasks"])
    for cell in compared:
        assert cell["minus"] == DENSE
        # Some heads spread their attention over more than the best 100 keys.
        spread = cell["method"].endswith("retrieval")
        assert cell["difference"]["value"] >= (-0.06 if spread else -0.01), cell


def test_a_window_finds_most_that_stands_in_it_and_nothing_else(record):
    longest = max(record["lengths"])
    place, last = ("depth", 0.9) if record["grid"] else ("fifth", 4)
    cells = [c for c in record["grid"] or record["by_depth"]
             if (c["method"], c["length"]) == (WINDOW, longest)]  # fmt: skip
    far = [c["score"]["value"] for c in cells if c[place] < last]
    near = [c["score"]["value"] for c in cells if c[place] > last]
    assert len(far) >= 8 and sum(far) / len(far) <= 0.1
    assert not near or min(near) >= 0.75  # at the end of the haystack; a fifth is wider


def test_kcache_says_what_dense_attention_says(record):
    assert record["host_values"] and min(record["lengths"]) > 128
    found = [c for c in record["agreement"] if c["method"] in KCACHE and c["length"] is None]
    assert len(found) == len(KCACHE) * len(record["tasks"])
    for cell in found:
        assert cell["with"] == DENSE and cell["share"]["n"] >= 500
        assert cell["share"]["value"] >= 0.99, cell


def test_the_card_shows_what_dense_attention_scores(record):
    card = (WEIGHTS.parent / "README.md").read_text(encoding="utf-8")
    rows = [row for row in next(tables(record)).rows if row[1] == DENSE]
    assert len(rows) == len(record["tasks"])
    for task, _, *cells in rows:
        assert f"| {task} | {' | '.join(cells)} |" in card
