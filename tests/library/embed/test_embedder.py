"""What an embedder promises its caller: order, kinds, counts, a digest, and checked functions."""

import functools
import json
import logging
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import ConfigError, EmbedderError, RequestError
from jaxrag.library.embed import Embedder, as_embedder, load_embedder
from jaxrag.library.embed import bert as bert_module
from jaxrag.library.embed import embedder as embedder_module
from jaxrag.library.embed.hf import Prefixes

GOLDENS = Path(__file__).parents[2] / "goldens" / "embed"


def letters(texts):
    """Counts of a, b and c: a small embedder that tests can predict."""
    return [[float(text.count(letter)) for letter in "abc"] for text in texts]


@pytest.fixture(scope="module")
def minilm():
    return load_embedder(GOLDENS / "minilm")


def test_it_is_an_embedder(minilm):
    assert isinstance(minilm, Embedder)
    assert minilm.dim == 24
    assert minilm([], "query").shape == (0, 24)


def test_windows_keep_the_order(minilm, monkeypatch):
    texts = [f"heron {'wait ' * (i % 7)}{i}" for i in range(23)]
    whole = minilm(texts, "passage")
    monkeypatch.setattr(embedder_module, "_WINDOW", 5)
    np.testing.assert_allclose(minilm(texts, "passage"), whole, rtol=1e-5, atol=1e-6)


def test_query_and_passage_differ_by_their_prefix():
    embedder = load_embedder(GOLDENS / "multilingual_e5")
    question = embedder(["heron"], "query")
    assert np.abs(question - embedder(["heron"], "passage")).max() > 1e-3
    bare = load_embedder(GOLDENS / "multilingual_e5")
    bare.prefixes = Prefixes()
    np.testing.assert_allclose(bare(["query: heron"], "passage"), question, atol=1e-6)


def test_lower_case_where_the_files_ask_for_it(embedder_dir, edit_json):
    directory = embedder_dir("roberta")
    texts = ["HERON", "heron"]
    upper, lower = load_embedder(directory)(texts, "passage")
    assert np.abs(upper - lower).max() > 1e-3
    edit_json(directory / "sentence_bert_config.json", do_lower_case=True)
    upper, lower = load_embedder(directory)(texts, "passage")
    np.testing.assert_array_equal(upper, lower)


def test_texts_that_are_cut_are_counted_and_reported_once(caplog):
    embedder = load_embedder(GOLDENS / "minilm")
    with caplog.at_level(logging.WARNING, "jaxrag"):
        embedder(["heron", "rain " * 50, "mill " * 50], "passage")
        embedder(["rain " * 50], "passage")
    assert embedder.truncated == 3
    (record,) = caplog.records
    assert record.getMessage().startswith("2 of 3 texts are longer than the embedder's 20 tokens")


def test_a_second_call_compiles_nothing(minilm):
    texts = ["heron " * (i % 17) for i in range(40)]
    minilm(texts, "passage")
    programs = bert_module.embed._cache_size()
    minilm(list(reversed(texts)), "passage")
    assert bert_module.embed._cache_size() == programs


@pytest.mark.parametrize(
    ("texts", "kind", "message"),
    [
        ("heron", "query", ""),
        (["heron", 3], "query", ""),
        (["heron"], "question", "kind='question'"),
    ],
)
def test_a_request_that_is_refused(minilm, texts, kind, message):
    for embedder in (minilm, as_embedder(letters)):
        with refused(RequestError, message):
            embedder(texts, kind)


def test_the_digest_tells_what_shapes_the_vectors(embedder_dir, edit_json):
    directory = embedder_dir("minilm")
    digest = load_embedder(directory).digest
    assert load_embedder(embedder_dir("minilm", "copy")).digest == digest
    others = []
    for at, (name, change) in enumerate((
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": False,
                                   "pooling_mode_cls_token": True}),
        ("config_sentence_transformers.json", {"prompts": {"query": "q: "}}),
        ("config_sentence_transformers.json", {"prompts": {"passage": "q: "}}),
        ("sentence_bert_config.json", {"max_seq_length": 19}),
    )):  # fmt: skip
        changed = embedder_dir("minilm", f"changed {at}")
        edit_json(changed / name, **change)
        others.append(load_embedder(changed).digest)
    steps = (changed / "modules.json").read_text()
    (changed / "modules.json").write_text(json.dumps(json.loads(steps)[:2]))
    others.append(load_embedder(changed).digest)
    config = directory / "config.json"
    config.write_text(config.read_text().replace('"gelu"', '"relu"'))
    others.append(load_embedder(directory).digest)
    others.append(load_embedder(GOLDENS / "bge").digest)
    assert len({digest, *others}) == len(others) + 1


def test_the_digest_is_the_same_in_another_process(minilm):
    program = "import sys, jaxrag.library.embed as e; print(e.load_embedder(sys.argv[1]).digest)"
    done = subprocess.run(
        [sys.executable, "-c", program, str(GOLDENS / "minilm")], capture_output=True, text=True
    )
    assert done.stdout.strip() == minilm.digest, done.stderr


def test_a_directory_an_embedder_and_a_function(minilm):
    assert as_embedder(GOLDENS / "minilm").digest == minilm.digest
    assert as_embedder(str(GOLDENS / "minilm")).digest == minilm.digest
    assert as_embedder(minilm) is minilm
    found = as_embedder(letters)
    assert isinstance(found, Embedder)
    assert found.dim == 3
    vectors = found(("abba", "cc"), "query")
    assert vectors.dtype == np.float32
    np.testing.assert_array_equal(vectors, [[2, 2, 0], [0, 0, 2]])
    assert found([], "passage").shape == (0, 3)


def test_a_function_may_return_any_array():
    for make in (np.array, jnp.array, lambda rows: np.array(rows, np.float64)):
        found = as_embedder(lambda texts, make=make: make(letters(texts)), name="letters")
        np.testing.assert_array_equal(found(["abc"], "query"), [[1, 1, 1]])


def test_the_identity_of_a_function():
    digest = as_embedder(letters).digest
    assert as_embedder(letters).digest == digest
    assert as_embedder(letters, name="mine").digest != digest
    assert as_embedder(lambda texts: letters(texts), name="mine").digest != digest
    for nameless in (lambda texts: letters(texts), functools.partial(letters), "abc".count):
        with refused(ConfigError):
            as_embedder(nameless)


def test_a_function_that_changes_its_mind():
    found = as_embedder(lambda texts: [[1.0] * len(texts)] * len(texts), name="bad")
    with refused(EmbedderError, "2"):
        found(["a", "b"], "query")
