"""Names, settings, presets, and everything a rule refuses, in one line."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import ConfigError, EngineError, RequestError
from jaxrag.engine import prefill
from jaxrag.engine.engine import engine_of
from jaxrag.reuse.attention_index import Exact, Ivf, ProjectedGraph, QueryLists, build
from jaxrag.reuse.decode import (
    DECODE_RULES,
    Account,
    DecodeRule,
    Dense,
    Flat,
    HostSearch,
    InfLLM,
    IvfRetrieval,
    Quest,
    Retrieval,
    SnapKV,
    StaticWindow,
    TopN,
    rule_from,
)
from jaxrag.reuse.methods import METHODS, Method, method_named
from jaxrag.serve.generate import generate


def test_presets_are_those_of_the_papers():
    assert METHODS["kcache"].decode == TopN(n=128, device_layers=1, renormalise=False)
    rule = METHODS["retrieval_attention"].decode
    assert isinstance(rule, Retrieval) and (rule.k, rule.sink, rule.recent) == (100, 128, 512)
    assert METHODS["turborag"].decode == Dense()


@pytest.mark.parametrize("name", DECODE_RULES)
def test_a_rule_by_name_is_its_default(name):
    rule = rule_from(name)
    assert rule == DECODE_RULES[name]() and rule.name == name
    assert rule_from(rule) is rule


def test_settings_come_as_a_table_or_as_one_text(tmp_path):
    assert rule_from({"name": "flat", "k": 7}) == Flat(k=7) == rule_from("flat:k=7")
    assert rule_from("topn:n=64,renormalise=true,device_layers=0") == TopN(64, 0, True)
    assert rule_from("static_window:positions=cache").positions == "cache"
    lists = {"name": "retrieval", "index": {"kind": "lists", "clusters": 4}}
    assert rule_from(lists).index == QueryLists(clusters=4)
    assert rule_from("retrieval:index=lists").index == QueryLists()
    text = "retrieval:index.exact_below=0,k=20,index=lists,index.probes=5"
    assert rule_from(text) == Retrieval(20, index=QueryLists(exact_below=0, probes=5))
    # Without a kind they are of the rule's own.
    assert rule_from("retrieval:index.exact_below=0").index == QueryLists(exact_below=0)
    assert rule_from({"name": "ivf", "index": {"exact_below": 9}}).index == Ivf(exact_below=9)
    path = tmp_path / "mine.toml"
    path.write_text('encoder = "isolated"\n[decode]\nname = "quest"\nbudget = 64\n')
    assert method_named(str(path)).decode == Quest(budget=64)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: TopN(n=0), RequestError, "n=0: expected a positive integer"),
        (lambda: TopN(device_layers=-1), RequestError, "device_layers=-1"),
        (lambda: Flat(k=0), RequestError, "k=0: expected a positive"),
        (lambda: Retrieval(k=-3), RequestError, "k=-3: expected a positive"),
        (lambda: Retrieval(trained_at="end"), RequestError, "trained_at='end': expected one of"),
        (lambda: IvfRetrieval(sink=-1), RequestError, "sink=-1: expected 0 or more"),
        (lambda: StaticWindow(recent=0), RequestError, "recent=0: expected a positive"),
        (lambda: StaticWindow(positions="new"), RequestError, "positions='new'"),
        (lambda: SnapKV(capacity=32, window=32), RequestError, "leaves nothing to choose"),
        (lambda: SnapKV(kernel=4), RequestError, "expected an odd number"),
        (lambda: Quest(budget=15), RequestError, "at least a page of 16"),
        (lambda: InfLLM(block=2), RequestError, "representatives=4 of a block of 2"),
        (lambda: rule_from("lru"), ConfigError, "name='lru': expected one of dense"),
        (lambda: rule_from("retrieval:index.ef=9"), ConfigError, "index: unknown key 'ef'"),
        (
            lambda: rule_from("retrieval:index=ivf,index.ef=9"),
            ConfigError,
            "decode.index: unknown key 'ef'",
        ),
        (lambda: rule_from("flat:index=ivf"), ConfigError, "index"),
        (lambda: rule_from("flat:k"), ConfigError, "'k' of 'flat:k': expected field=value"),
        (lambda: rule_from("flat:n=3"), ConfigError, "unknown key 'n'"),
        (lambda: rule_from("retrieval:index=tree"), ConfigError, "decode.index: kind='tree'"),
    ],
)
def test_bad_settings_are_one_line(make, error, message):
    with pytest.raises(error, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Flat(k=600, recent=32), "k=600"),
        (Retrieval(), "recent=640"),
        (TopN(n=513), "n=513"),
        (TopN(device_layers=4), "device_layers=4"),
        (Quest(budget=64, dense_layers=3), "dense_layers=3"),
        (InfLLM(recent=8, blocks=8), "block=1024"),
    ],
)
def test_a_model_that_a_rule_cannot_serve(model_of, rule, message):
    method = dataclasses.replace(METHODS["turborag"], decode=rule)
    options = {"documents": [np.arange(3, 40)], "model": model_of(), "method": method}
    with refused(RequestError, message) as caught:
        generate(np.arange(3, 9), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rule", [Flat(k=8, recent=32), TopN(n=8), Quest(64), SnapKV(64)])
def test_a_sliding_window_leaves_nothing_to_choose(tiny_config, rule):
    with refused(RequestError, "7"):
        rule.check(tiny_config("mistral"))
    Dense().check(tiny_config("mistral"))


def test_composite_positions_are_no_order():
    for rule in (StaticWindow(), Flat(), Retrieval(), IvfRetrieval(), SnapKV(), InfLLM()):
        with refused(RequestError):
            Method("odd", encoder="isolated", positions="composite", decode=rule)
    for rule in (Dense(), TopN(), Quest()):
        Method("fine", encoder="isolated", positions="composite", decode=rule)


def test_generate_and_its_option(model_of, ids):
    """A rule given to generate() replaces the method's, and the answer is that of the method."""
    model = model_of()
    document, question = (list(map(int, x)) for x in ids(90, 7))
    options = {"documents": [document], "model": model, "max_new_tokens": 9}
    plain = generate(question, method="turborag", **options)
    narrow = generate(
        question, method="turborag", decode="static_window:sink=1,recent=2", **options
    )
    assert narrow.token_ids != plain.token_ids and narrow.token_ids[0] == plain.token_ids[0]
    assert not narrow.notes  # the first call stored the chunk
    with refused(ConfigError, "name='none'"):
        generate(question, decode="none", **options)


@pytest.mark.slow
def test_an_index_that_scans_everything_is_named(model_of, ids):
    """Too few keys for a graph: the result says so, and every request of a batch does."""
    documents, questions = list(ids(90)), [list(map(int, q)) for q in ids(7, 5)]
    options = {"documents": documents, "model": model_of(), "method": "turborag"}
    rule = Retrieval(k=6, sink=4, recent=8)
    for out in generate(questions, decode=rule, max_new_tokens=5, **options):
        note = next(note for note in out.notes if "decode rule" in note)
        assert "'retrieval'" in note and "32768" in note


@pytest.mark.slow
def test_streams_side_by_side_have_accounts_of_their_own(model_of, ids):
    model, rule = model_of(), Retrieval(k=6, sink=4, recent=8)
    options = {"model": model, "method": "turborag", "decode": rule, "max_new_tokens": 20}
    asked = [(ids(7)[0], list(ids(40))), (ids(9)[0], list(ids(90, 30)))]
    alone = [generate(q, documents=d, **options) for q, d in asked]
    streams = [generate(q, documents=d, stream=True, **options) for q, d in asked]
    list(itertools.zip_longest(*streams))  # in turn
    for result, expected in zip([stream.result for stream in streams], alone, strict=True):
        assert result.indexes == expected.indexes
        assert result.notes == expected.notes[-1:]  # the chunks are stored by now
        assert result.token_ids == expected.token_ids
    assert 0 < alone[0].indexes["keys"] < alone[1].indexes["keys"]
    held = engine_of(model).call(lambda runner: dict(runner.host_search._requests))
    assert not held  # of requests that are done


def test_requests_are_accounted_for_by_number():
    host = HostSearch()
    one, other = host.admit(), host.admit()
    keys = np.ones((2, 9, 10), np.float32)  # of 2 KV heads
    for number, count in ((one, 5), (other, 9), (one, 5)):
        some = keys[:, :count]
        made = [build(head, None, Exact("float32")) for head in some]
        host.open(number, made, some, np.arange(count))
    host.note(other, "twice")
    host.note(other, "twice")
    assert host.account_of([one]) == Account(keys=20, index_bytes=20 * 40)
    both = host.account_of([one, other])
    assert (both.keys, both.index_bytes, both.notes) == (38, 38 * 40, ("twice",))
    host.release([other])
    assert host.account_of([one]).keys == 20
    with pytest.raises(KeyError):
        host.account_of([other])


def test_a_layer_may_have_exact_heads_beside_graphs():
    """And keys that are not to be found: every head finds as many others as are asked for."""
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((2, 300, 10)).astype(np.float32)  # of 2 KV heads
    asked = rng.standard_normal((2, 3, 64, 10)).astype(np.float32)
    spec = ProjectedGraph(
        degree=16, knn=40, storage="float32", exact_below=0, min_queries=1, most_scanned=1.0
    )
    made = [
        build(keys[0], asked[0], spec, asked=asked[0], k=10),
        build(keys[1], None, Exact("float32")),
    ]
    assert len(made[0].efforts) == 3
    positions = np.where(np.arange(300) % 3, np.arange(300), -1).astype(np.int32)
    host = HostSearch()
    part = host.open(host.admit(), made, keys, positions)
    q = asked[:, :, 0]
    scores = np.where(positions >= 0, q @ keys.transpose(0, 2, 1), -np.inf)
    best = np.argsort(-scores, axis=-1)[..., :10]
    ours = np.empty((2, 3, 10), np.int32)
    for at in np.ndindex(2, 3):
        found = part.best(*at, q[at], 10)
        ours[at] = found.ids[np.argsort(-found.scores, kind="stable")[:10]]
    assert (ours >= 0).all() and (ours % 3 > 0).all()
    np.testing.assert_array_equal(ours[1], best[1])
    assert np.mean([np.isin(best[0, g], ours[0, g]).mean() for g in range(3)]) >= 0.8


@dataclasses.dataclass(frozen=True)
class Newest(DecodeRule):
    """The newest token alone; its state counts the steps."""

    name: str = dataclasses.field(default="newest", init=False)

    def tokens(self):
        return {}

    def prepare(self, view, queries, positions, room):
        return jnp.zeros(view.position.shape, jnp.int32)

    def attend(self, view, layer, state):
        return view.attend_at(*view.window(0, 1)), state + 1


def test_a_rule_is_a_class_and_one_line(model_of, ids, monkeypatch):
    """Nothing else in the program knows its name."""
    monkeypatch.setitem(DECODE_RULES, "newest", Newest)
    options = {"documents": list(ids(30)), "model": model_of(), "max_new_tokens": 6}
    question = ids(5)[0]
    ours = generate(question, decode="newest", method="turborag", **options)
    same = generate(question, decode="static_window:sink=0,recent=1", method="turborag", **options)
    assert ours.token_ids == same.token_ids
    for missing in ("tokens", "attend"):
        with pytest.raises(TypeError, match=missing):
            type("Odd", (Newest,), {missing: getattr(DecodeRule, missing)})()


def test_one_token_needs_no_rule(model_of, ids, monkeypatch):
    """The first token comes from prefill: nothing is prepared, no query is kept."""
    kept = []
    begin = prefill.Prefill.__init__

    def watched(self, runner, requests, observe, rows=None):
        kept.append(observe)
        begin(self, runner, requests, observe, rows)

    def never(*arguments):
        raise AssertionError("a rule was prepared")

    monkeypatch.setattr(prefill.Prefill, "__init__", watched)
    monkeypatch.setattr(Retrieval, "begin", never)
    options = {"documents": list(ids(30)), "model": model_of(), "method": "turborag"}
    rule = Retrieval(k=4, sink=4, recent=8)
    out = generate(ids(5)[0], decode=rule, max_new_tokens=1, **options)
    assert len(out.token_ids) == 1 and out.finish_reason == "length" and kept == [None]
    assert out.indexes == {"keys": 0, "stored": 0, "trained": 0}
    with refused(EngineError):
        generate(ids(5)[0], decode=rule, max_new_tokens=2, **options)


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
        np.testing.assert_allclose(ours, flat, rtol=1e-4, atol=2e-5)


def test_a_host_ceiling_is_checked_before_anything_is_built(model_of, ids):
    rule = Retrieval(k=6, sink=4, recent=8, index=Exact("float16"), max_host_bytes=1000)
    options = {"documents": list(ids(37, 20)), "model": model_of(), "method": "turborag"}
    with refused(RequestError, "max_host_bytes=1000"):
        generate(ids(9)[0], decode=rule, max_new_tokens=12, **options)
