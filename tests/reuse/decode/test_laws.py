"""Laws 7, 8 and 12 of the decode rules, on random models in float32."""

import dataclasses

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.config import RopeConfig, YarnScaling
from jaxrag.base.errors import RequestError
from jaxrag.engine import decoding as answer
from jaxrag.engine import prefill
from jaxrag.engine.engine import engine_of
from jaxrag.reuse.attention_index import Exact, ProjectedGraph
from jaxrag.reuse.attention_index import Ivf as IvfIndex
from jaxrag.reuse.decode import (
    DECODE_RULES,
    Dense,
    Flat,
    InfLLM,
    IvfRetrieval,
    Quest,
    Retrieval,
    SnapKV,
    StaticWindow,
    TopN,
    retrieval,
)
from jaxrag.reuse.decode import rule as rule_module
from jaxrag.serve.generate import generate

CLOSE = {"rtol": 1e-4, "atol": 2e-5}

# Settings under which a rule leaves nothing out of a prompt of a hundred tokens.
EVERYTHING = [
    StaticWindow(sink=0, recent=200),
    StaticWindow(sink=3, recent=200, positions="cache"),
    StaticWindow(sink=200, recent=20),
    Flat(k=300, sink=2, recent=5),
    Flat(k=1, sink=4, recent=300),
    TopN(n=400, device_layers=0),
    TopN(n=400, device_layers=0, renormalise=True),
    TopN(n=1, device_layers=3),
    Quest(budget=512, dense_layers=0),
    SnapKV(capacity=300, window=4),
    InfLLM(block=8, blocks=40, representatives=2, sink=4, recent=12),
    Retrieval(k=300, sink=2, recent=5),
    IvfRetrieval(k=300, sink=0, recent=1),
    InfLLM(block=8, blocks=2, sink=4, recent=300, positions="cache"),
]
# Settings that leave most of such a prompt out.
SPARSE = [
    StaticWindow(sink=4, recent=8),
    StaticWindow(sink=4, recent=8, positions="cache"),
    Flat(k=6, sink=4, recent=8),
    TopN(n=8),
    TopN(n=8, device_layers=0, renormalise=True),
    Retrieval(k=6, sink=4, recent=8),
    IvfRetrieval(k=6, sink=4, recent=8, index=IvfIndex(clusters=8, probes=2, exact_below=0)),
    Quest(budget=32, dense_layers=1),
    SnapKV(capacity=20, window=4),
    InfLLM(block=8, blocks=2, representatives=2, sink=4, recent=12),
    InfLLM(block=8, blocks=2, representatives=2, sink=4, recent=12, positions="cache"),
]


def name_of(rule):
    fields = dataclasses.asdict(rule)
    return "-".join(
        str(v) for v in (fields.pop("name"), *fields.values()) if isinstance(v, int | str)
    )


def marked(rules, fast):
    """The rules, those whose names are not ``fast`` marked slow: each compiles a program."""
    slow = pytest.mark.slow
    return [pytest.param(r, id=name_of(r), marks=() if r.name in fast else slow) for r in rules]


@pytest.mark.parametrize("rule", EVERYTHING, ids=name_of)
@pytest.mark.parametrize(
    "method", [pytest.param("full_attention", marks=pytest.mark.slow), "turborag"]
)
def test_law_8_a_rule_that_leaves_nothing_out_is_dense(
    model_of, ids, a_prompt, next_logits, method, rule
):
    model, prompt = model_of(), a_prompt()
    given = ids(9)[0][None]
    expected = next_logits(model, method, [prompt], Dense(), given)
    ours = next_logits(model, method, [prompt], rule, given)
    np.testing.assert_allclose(ours, expected, **CLOSE)
    np.testing.assert_array_equal(ours.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("rule", [Flat(k=300, sink=2, recent=5), Quest(512, 0)], ids=name_of)
def test_law_8_where_a_factor_is_on_part_of_the_head(model_of, ids, a_prompt, next_logits, rule):
    """YaRN multiplies the rotary dims of q and k once each, in paged attention as in rules."""
    scaling = YarnScaling(4.0, 64, 32.0, 1.0, 1.5, True)
    model, prompt = model_of(rope=RopeConfig(5_000.0, 6, False, scaling)), a_prompt()
    given = ids(3)[0][None]
    expected, ours = (next_logits(model, "turborag", [prompt], r, given) for r in (Dense(), rule))
    np.testing.assert_allclose(ours, expected, **CLOSE)


@pytest.mark.parametrize("rule", marked(EVERYTHING, set()))
def test_law_8_token_for_token(model_of, a_prompt, decoded, rule):
    model, prompt = model_of(), a_prompt()
    one, other = (decoded(model, "turborag", [prompt], r) for r in (Dense(), rule))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("rule", SPARSE, ids=name_of)
def test_a_rule_that_leaves_something_out_differs(model_of, ids, a_prompt, next_logits, rule):
    model, prompt = model_of(), a_prompt()
    given = ids(5)[0][None]
    dense, ours = (next_logits(model, "turborag", [prompt], r, given) for r in (Dense(), rule))
    assert np.abs(dense - ours).max() > 1e-3
    assert np.isfinite(ours).all()


@pytest.mark.parametrize("rule", marked(SPARSE, {"flat"}))
def test_law_12_a_batch_equals_one_at_a_time(model_of, ids, a_prompt, next_logits, rule):
    model = model_of()
    shared = ids(37, 21)
    prompts = [
        dataclasses.replace(a_prompt(final=n), chunks=shared[: 1 + i % 2])
        for i, n in enumerate((9, 3, 30))
    ]
    given = np.stack(ids(6, 6, 6))
    together = next_logits(model, "turborag", prompts, rule, given)
    for row, prompt in enumerate(prompts):
        alone = next_logits(model, "turborag", [prompt], rule, given[row : row + 1])
        np.testing.assert_allclose(alone[0], together[row], **CLOSE)


@pytest.mark.parametrize("rule", [Flat(k=300, sink=4, recent=8), Quest(512, 0), SnapKV(300, 4)],
                         ids=name_of)  # fmt: skip
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "glm", "glm4"])
@pytest.mark.slow
def test_every_family(model_of, ids, a_prompt, next_logits, family, rule):
    """Rules choose keys as the model scores them: biases, norms, partial and interleaved rotary."""
    model, prompt = model_of(family), a_prompt()
    given = ids(3)[0][None]
    expected, ours = (next_logits(model, "turborag", [prompt], r, given) for r in (Dense(), rule))
    np.testing.assert_allclose(ours, expected, **CLOSE)


def test_a_graph_trained_on_the_prompt_is_searched(
    model_of, ids, a_prompt, next_logits, accounts, monkeypatch
):
    """Prefill keeps queries, the host builds graphs from them, and decoding finds keys there."""
    asked_at, index_head = [], Retrieval.index_head

    def index(rule, keys, bank, rope, start, room, spec):
        asked_at.append((start, room, len(bank.positions)))
        return index_head(rule, keys, bank, rope, start, room, spec)

    monkeypatch.setattr(Retrieval, "index_head", index)
    model, prompt = model_of(), a_prompt(final=60)
    graph = ProjectedGraph(degree=16, knn=24, ef=80, exact_below=0, min_queries=32)
    rule = Retrieval(k=6, sink=4, recent=8, index=graph, queries=64)
    host = engine_of(model).runner.host_search
    host.measure = True
    try:
        given = ids(5)[0][None]
        ours = next_logits(model, "full_attention", [prompt], rule, given)
    finally:
        host.measure = False
    (account,) = accounts
    (at,) = {(start, kept) for start, _, kept in asked_at}
    assert at == (prompt.num_tokens, 64)  # the answer begins there
    assert min(room for _, room, _ in asked_at) >= 5
    assert account.notes == () and account.searches == 3 * 5 * 6
    assert account.found / account.wanted > 0.9
    if account.found == account.wanted:
        flat = next_logits(model, "full_attention", [prompt], Flat(6, 4, 8), given)
        np.testing.assert_allclose(ours, flat, **CLOSE)


def test_a_host_ceiling_is_checked_before_anything_is_built(model_of, a_prompt, decoded):
    exact = Exact("float16")
    rule = Retrieval(k=6, sink=4, recent=8, index=exact, max_host_bytes=1000)
    with refused(RequestError, "max_host_bytes=1000"):
        decoded(model_of(), "turborag", [a_prompt()], rule)


@pytest.mark.slow
def test_another_length_does_not_recompile(ids, model_of):
    """Prompts and answers of other lengths run through what is compiled already."""
    model = model_of("llama", num_layers=2)
    rules = [rule for rule in SPARSE if getattr(rule, "device_layers", 0) < 2]

    def ask(question, documents, new_tokens):
        for rule in rules:
            generate(ids(question)[0], documents=list(ids(*documents)), model=model, decode=rule,
                     method="turborag", max_new_tokens=new_tokens)  # fmt: skip

    compiled = (
        prefill._prefill_piece,
        answer._join,
        answer._put_decoding,
        answer._steps,
        rule_module.prepare_layers,
        retrieval._keys,
    )
    ask(30, (100, 90), 9)
    before = [function._cache_size() for function in compiled]
    for question, documents, new_tokens in ((25, (98, 91), 16), (17, (90, 90), 3)):
        ask(question, documents, new_tokens)
    assert [function._cache_size() for function in compiled] == before


def test_every_rule_is_tested():
    tested = {rule.name for rule in EVERYTHING} & {rule.name for rule in SPARSE}
    assert tested == set(DECODE_RULES) - {"dense"}
