"""Methods that recompute: presets, files, ratios, the account of a result, and the program."""

import dataclasses
import json

import numpy as np
import pytest
from refusal import refused

from jaxrag import KnowledgeBase, generate
from jaxrag.base.errors import ConfigError, RequestError
from jaxrag.cli import main
from jaxrag.engine.engine import engine_of
from jaxrag.library.documents import Document
from jaxrag.models.flops import turborag_flops
from jaxrag.models.segments import lay_out
from jaxrag.reuse.methods import METHODS, Method, method_named
from jaxrag.reuse.select import (
    SELECTORS,
    AllTokens,
    CacheCraft,
    FirstK,
    KvDeviation,
    NoTokens,
    QueryGuided,
    RandomTokens,
    selector_from,
)

PAPERS = ("fusionrag", "cacheblend", "cache_craft", "epic")


def test_presets_are_what_the_papers_say():
    assert METHODS["fusionrag"] == Method(
        "fusionrag",
        encoder="neighbours",
        first_encoder="after_prefix",
        selector=QueryGuided(over="question"),
        recompute_ratio=0.15,
    )
    assert METHODS["cacheblend"].selector == KvDeviation(layers=(1,), part="v")
    assert METHODS["cacheblend"].recompute_ratio == 0.15
    assert METHODS["cache_craft"].selector == CacheCraft(alpha=1.0)
    assert METHODS["cache_craft"].recompute_ratio is None
    assert METHODS["epic"].selector == FirstK(k=16)
    assert METHODS["epic"].encoder == "isolated"
    assert not METHODS["turborag"].recomputes


@pytest.mark.parametrize("name", SELECTORS)
def test_a_record_of_a_method_names_its_selector(name):
    selector = selector_from(name)
    assert dataclasses.asdict(selector)["name"] == name
    assert selector_from(dataclasses.asdict(selector)) == selector


def test_a_method_file_may_describe_its_selector(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'encoder = "after_prefix"\nrecompute_ratio = 0.2\n'
        '[selector]\nname = "kv_deviation"\nlayers = [1, 3]\nwidths = [1.5]\n'
    )
    method = method_named(str(path))
    assert method.selector == KvDeviation(layers=(1, 3), widths=(1.5,))
    assert hash(method) == hash(dataclasses.replace(method))
    path.write_text('encoder = "isolated"\nselector = "first_k"\n')
    assert method_named(str(path)).selector == FirstK()
    path.write_text('encoder = "isolated"\n[selector]\nname = "first_k"\nkk = 3\n')
    with refused(ConfigError, "'kk'"):
        method_named(str(path))
    path.write_text('encoder = "isolated"\nselector = "best"\n')
    with refused(ConfigError, "'best'"):
        method_named(str(path))


@pytest.mark.parametrize("ratio", [-0.1, 1.01, 15, float("nan")])
@pytest.mark.parametrize("method", [*PAPERS, "turborag"])
def test_ratios_out_of_range_are_refused(method, ratio):
    with refused(RequestError, "0"):
        METHODS[method].with_ratio(ratio)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: METHODS["turborag"].with_ratio(0.1), ""),
        (lambda: METHODS["full_attention"].with_ratio(1), ""),
        (lambda: Method("x", "isolated", selector=RandomTokens()), "recompute_ratio"),
        (lambda: Method("x", "isolated", selector=QueryGuided()), "recompute_ratio"),
        (
            lambda: Method("x", "isolated", selector=AllTokens(), recompute_ratio=0.5),
            "'all'",
        ),
        (lambda: Method("x", None, selector=FirstK()), ""),
        (
            lambda: Method("x", "isolated", positions="composite", selector=FirstK()),
            "",
        ),
        (lambda: QueryGuided(over="all"), "over='all'"),
        (lambda: QueryGuided(place="here"), "as_cached"),
        (lambda: KvDeviation(layers=(0,)), "0"),
        (lambda: KvDeviation(layers=(2, 1), widths=(1.5,)), ""),
        (lambda: KvDeviation(layers=()), ""),
        (lambda: KvDeviation(layers=(1, 2)), "1"),
        (lambda: KvDeviation(layers=(1, 2), widths=(0.5,)), "1"),
        (lambda: KvDeviation(layers=(1, 2, 3), widths=(1.1, 1.5)), ""),
        (lambda: KvDeviation(part="q"), ""),
        (lambda: Method("x", encoder="after_prefix", positions="composite"), ""),
        (lambda: Method("x", encoder="isolated", positions="sideways"), "positions='sideways'"),
        (lambda: CacheCraft(alpha=0), ""),
        (lambda: FirstK(k=-1), "k=-1"),
    ],
)
def test_settings_without_a_meaning_are_refused(make, words):
    with refused(RequestError, words):
        make()


def test_a_selector_that_needs_more_layers_is_refused_before_any_work(model_of, work, rng):
    model = model_of("llama", num_layers=2)
    document = list(map(int, work.ids(rng, 20)[0]))
    for selector in (KvDeviation(layers=(2,)), CacheCraft(layers=3)):
        with refused(RequestError):
            generate([5, 6], documents=[document], model=model, method=work.method(selector, 0.5))
    assert not work.method(KvDeviation(layers=(2,)), 0).recomputes  # ratio 0 needs none of them


@pytest.mark.parametrize("name", ["cacheblend", "cache_craft", "epic"])
def test_counts_and_flops_of_a_result(model_of, work, name):
    model, rng = model_of("llama", eos_ids=()), np.random.default_rng(len(name))  # new documents
    documents = [list(map(int, d)) for d in work.ids(rng, 40, 41, 42)]
    question = list(map(int, work.ids(rng, 9)[0]))
    options = {"documents": documents, "model": model, "max_new_tokens": 1}
    first = generate(question, method=name, recompute_ratio=0.2, **options)
    assert first.counts == {"reused": 0, "recomputed": 0, "encoded": 123}
    again = generate(question, method=name, recompute_ratio=0.2, **options)
    chosen = 18 if name == "epic" else 25  # 9 + 9 of the chunks that are not exact; ceil(24.6)
    assert again.counts == {"reused": 123 - chosen, "recomputed": chosen, "encoded": 0}
    assert again.token_ids == first.token_ids
    config = model.config
    encoding = sum(turborag_flops(config, len(d), len(d)) for d in documents)
    assert first.flops == again.flops + encoding
    computed = turborag_flops(config, chosen + 9, 123 + 9)
    if name == "epic":
        assert again.flops == computed
    else:
        layers = config.num_layers
        passes = turborag_flops(config, 123, 123) * (1 if name == "cacheblend" else 2) // layers
        assert again.flops - computed >= passes
    partly = generate(question, method=name, recompute_ratio=0.2,
                      **{**options, "documents": [*documents[:2], [len(name), 8, 9]]})  # fmt: skip
    assert partly.counts["encoded"] == 3
    assert sum(partly.counts.values()) == 84
    assert partly.counts["recomputed"] > 0


def test_pages_of_recomputed_tokens_go_back(model_of, work, rng):
    model = model_of("llama", eos_ids=())
    documents = [list(map(int, d)) for d in work.ids(rng, 100, 90)]
    options = {"documents": documents, "model": model, "max_new_tokens": 3}
    generate([5, 6], method="full_reuse", **options)
    free = engine_of(model).runner.cache.allocator.num_free
    for ratio in (0, 0.3, 1):
        generate([5, 6], method="cacheblend", recompute_ratio=ratio, **options)
        assert engine_of(model).runner.cache.allocator.num_free == free


def test_only_the_methods_that_recompute_need_room(work):
    lengths = [100, 50]
    assert METHODS["turborag"].room(lengths) == 0
    assert METHODS["cacheblend"].room(lengths) == 23
    assert METHODS["cacheblend"].with_ratio(0).room(lengths) == 0
    assert METHODS["epic"].room(lengths) == 32
    assert METHODS["epic"].with_ratio(0.5).room(lengths) == 75
    assert METHODS["cache_craft"].room(lengths) == 150
    assert work.method(KvDeviation(layers=(1, 2), widths=(2.0,)), 0.1).room(lengths) == 30
    assert work.method(NoTokens(), None).room(lengths) == 0


@pytest.fixture(scope="module")
def kb_dir(tmp_path_factory, text_model):
    """A knowledge base that holds every variant the presets reuse."""
    path = tmp_path_factory.mktemp("kb") / "kb"
    texts = {
        "salt": "The salt wells of Yanjing are worked by hand.",
        "bridge": "A bamboo bridge crosses the river at the salt wells.",
        "tea": "Tea bricks were traded for salt and for wool.",
    }
    variants = ("isolated", "after_prefix", "neighbours")
    sizes = {"template": "plain", "chunk_tokens": 64}
    with KnowledgeBase.open(path, text_model, encoders=variants, **sizes) as kb:
        kb.add([Document(name, text) for name, text in texts.items()])
    return path


@pytest.mark.parametrize("method", PAPERS)
def test_ask_over_a_knowledge_base(kb_dir, capsys, method):
    answers = []
    for ratio in (0.5, 0):
        arguments = ["ask", "Who works the salt wells?", "--kb", str(kb_dir), "--method", method]
        arguments += ["--recompute-ratio", str(ratio), "--max-new-tokens", "4", "--json"]
        assert main([*arguments, "--cache-tokens", "4096"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    half, none = answers
    total = sum(half["counts"].values())
    assert half["counts"]["encoded"] == 0 < half["counts"]["recomputed"] < total
    assert none["counts"] == {"reused": total, "recomputed": 0, "encoded": 0}
    assert none["flops"] < half["flops"]
    assert half["notes"] == none["notes"] == []


def test_ask_refuses_a_bad_ratio_in_one_line(kb_dir, capsys):
    arguments = ["ask", "Salt?", "--kb", str(kb_dir), "--cache-tokens", "4096"]
    for more, words in (
        (["--method", "epic", "--recompute-ratio", "1.5"], "expected a number from 0 to 1"),
        (["--method", "turborag", "--recompute-ratio", "0.5"], "recomputes nothing"),
    ):
        assert main([*arguments, *more]) == 1
        out, err = capsys.readouterr()
        assert out == "" and words in err and err.count("\n") == 1


def test_composite_with_a_window_is_refused(model_of):
    model = model_of("mistral")
    with refused(RequestError):
        generate([5, 6], documents=[[7, 8]], model=model, method="turborag_composite")
    layout = lay_out(2, [3, 4], 2, "composite")
    whole = np.full((1, 11), 5)
    with refused(RequestError, "7"):
        model.logits(whole, layout.positions[None], layout.segments[None])
