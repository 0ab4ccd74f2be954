"""What decode rules read at the positions of an answer, beside slow sums."""

import index
import index_answers
import numpy as np
import pytest
from attention_heads import HeadSpec

from jaxrag.reuse.attention_index import QueryLists, rotated
from jaxrag.reuse.decode import Flat, InfLLM, Quest, Retrieval, SnapKV, StaticWindow, TopN

SPEC = HeadSpec(seed=3, head_dim=32, model_dim=64, words=128, topics=8, group=2)
PROMPT, STEPS = 300, 3


@pytest.fixture(scope="module")
def heads():
    return index_answers.generated_heads(SPEC, PROMPT, STEPS)[0]


def weights_of(heads, step):
    """Softmax of one token over all keys [G, t], and the values [t, H]."""
    end = heads.prompt + step + 1
    keys = rotated(heads.keys[:end, 0], np.arange(end), heads.rope).astype(np.float64)
    q = rotated(heads.queries[end - 1 : end].swapaxes(0, 1), np.array([end - 1]), heads.rope)[:, 0]
    scores = q @ keys.T * SPEC.head_dim**-0.5
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True), heads.values[:end, 0].astype(np.float64)


@pytest.mark.parametrize(
    "rule", [TopN(n=30, device_layers=0, renormalise=True), TopN(n=30, device_layers=0)], ids=str
)
def test_mass_recall_and_error_are_those_of_the_kept_weights(heads, rule):
    told = index_answers.read(heads, rule)
    for step in range(STEPS):
        weights, values = weights_of(heads, step)
        kept = np.where(weights >= np.sort(weights)[:, -30:-29], weights, 0)
        dense = weights @ values
        out = (kept / kept.sum(1, keepdims=True) if rule.renormalise else kept) @ values
        off = ((out - dense) ** 2).sum(1)
        np.testing.assert_allclose(told["mass"][step], kept.sum(1), rtol=1e-4)
        np.testing.assert_allclose(told["error"][step], off / (dense**2).sum(1), rtol=1e-2)
        np.testing.assert_allclose(told["mse"][step], off / SPEC.head_dim, rtol=1e-2)
        np.testing.assert_allclose(told["recall_20"][step], 1, rtol=1e-4)
        np.testing.assert_allclose(told["recall_100"][step], 0.3, rtol=1e-4)


@pytest.mark.parametrize(
    "rule",
    [
        StaticWindow(sink=4, recent=400),
        Flat(k=300, sink=4, recent=32),
        Quest(budget=400),
        SnapKV(capacity=400),
        InfLLM(block=32, blocks=16, sink=4, recent=32),
    ],
    ids=lambda rule: rule.name,
)
def test_a_rule_that_leaves_nothing_out_reads_everything(heads, rule):
    told = index_answers.read(heads, rule)
    for name in ("mass", "recall_20", "recall_100"):
        np.testing.assert_allclose(told[name], 1, rtol=1e-4)
    assert told["error"].max() < 1e-8


def test_a_window_reads_its_share_of_the_best_keys(heads):
    told = index_answers.read(heads, StaticWindow(sink=4, recent=32))
    for step in range(STEPS):
        weights, _ = weights_of(heads, step)
        end = weights.shape[1]
        inside = np.isin(np.arange(end), [*range(4), *range(end - 32, end)])
        best = np.argsort(-weights, axis=1)[:, :20]
        np.testing.assert_allclose(told["mass"][step], weights[:, inside].sum(1), rtol=1e-4)
        np.testing.assert_allclose(told["recall_20"][step], inside[best].mean(1), atol=1e-4)


def test_searches_are_told_by_task_and_kind(heads, monkeypatch):
    spec = QueryLists(exact_below=0, min_queries=1)
    rule = Retrieval(k=20, sink=4, recent=32, queries=200, index=spec)
    monkeypatch.setattr(index_answers, "SEARCHES", {"lists": rule})
    result = index_answers.run_searches([heads, heads], ["lists"])
    (row,) = result["rows"]
    assert (row["task"], row["index"], row["tokens"], row["heads"]) == ("generated", "lists", 3, 4)
    assert 0.9 < row["worst_head"] <= row["recall"] == row["worst_block"] <= 1
    assert 0 < row["scanned"] <= 2 and row["exact"] + row["more"] + row["failed"] <= 4
    assert "| generated (3) | lists |" in list(index_answers.report_searches(result))[-1]


def test_sparse_heads_are_as_sparse_as_asked_for():
    (heads,), scale = index_answers.sparse_heads(SPEC, PROMPT, STEPS, kept=36, most=1e-4)
    assert scale > 1
    told = index_answers.read(heads, TopN(n=36, device_layers=0, renormalise=True))
    assert told["mse"].mean() < 1e-4


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--answers", "vt"], "--answers needs --model"),
        (
            ["--answers", "chess", "--model", "DIR"],
            "--answers 'chess': expected some of",
        ),
        (
            ["--answers", "vt", "--model", "DIR", "--searches", "all"],
            "--searches 'all': expected some of lists, graph, ivf",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(more, message, capsys):
    assert index.main(more) == 1
    assert message in capsys.readouterr().err
