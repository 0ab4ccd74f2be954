"""A primer that is keys and values of every layer: by numpy, its keys, its file, and refusals."""

import dataclasses
import json

import numpy as np
import pytest
from numpy_llama import CLOSE, Llama, logits_of
from refusal import refused
from safetensors.numpy import load_file, save_file

from jaxrag import KnowledgeBase, generate
from jaxrag.base.errors import ConfigError, KnowledgeBaseError, RequestError
from jaxrag.base.sharding import make_mesh
from jaxrag.engine import wire
from jaxrag.engine.mapping import sequence_of
from jaxrag.engine.request import Prompt, Request
from jaxrag.kv.store import MemoryStore, derive
from jaxrag.measure.evals.priming import start_layers
from jaxrag.models.model import random_model
from jaxrag.reuse.encode import (
    ChunkEncoding,
    ChunkInContext,
    Primer,
    primer_from_dict,
    primer_named,
)
from jaxrag.reuse.encode.primer import PrimerVectors, write_vectors
from jaxrag.reuse.methods import METHODS

PRIMED, COUNT = METHODS["primed"], 6


@pytest.fixture(scope="module")
def model(tiny_config):
    return random_model(tiny_config("llama"), seed=4, cache_tokens=2048)


def given_for(model, count=COUNT, seed=9):
    """K and V [R, L, 2, K, H] float32, of no token."""
    c = model.config
    shape = (count, c.num_layers, 2, c.num_kv_heads, c.head_dim)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.fixture(scope="module")
def given(model):
    return given_for(model)


@pytest.fixture(scope="module")
def parts():
    """Prefix, two chunks and the final block."""
    rng = np.random.default_rng(8)
    return [rng.integers(3, 101, n).astype(np.int32) for n in (5, 14, 9, 7)]


@pytest.fixture
def store(model, request):
    """Its chunks are no other test's, in the pool neither."""
    return MemoryStore(derive(model.fingerprint, salt=request.node.name), model.kv_layout)


def encoded(model, store, prefix, chunks, primer, apart=False):
    """KV [L, 2, T, K, H] of every chunk."""
    encoding = ChunkEncoding(model, store, prefix, apart=apart, primer=primer)
    wanted = {encoding.key("primed", it): ChunkInContext(it) for it in chunks}
    made = {it.key: it.kv for it in encoding.encode("primed", wanted)}
    return [made[key] for key in wanted]


@pytest.mark.parametrize("apart", [False, True])
def test_by_numpy_kv_and_answers_are_those_of_the_definition(model, parts, given, store, apart):
    """Behind the prefix stand R positions with K and V of the file, whatever the tokens there."""
    prefix, *chunks, final = parts
    llama, start, before = Llama(model), len(prefix), len(prefix) + COUNT
    kv = given.transpose(1, 2, 0, 3, 4)
    rows = [np.concatenate((prefix, np.zeros(COUNT, np.int32), it)) for it in chunks]
    expected = [llama.run(row, kv, start)[1][:, :, before:] for row in rows]
    for made, wanted in zip(
        encoded(model, store, prefix, chunks, given, apart), expected, strict=True
    ):
        np.testing.assert_allclose(made, wanted, **CLOSE)
    prompt = Prompt(prefix, tuple(chunks), final)
    logits, _ = llama.run(prompt.ids, np.concatenate(expected, axis=2), start)
    request = Request(prompt, store, PRIMED, 4, primer=given)
    np.testing.assert_allclose(logits_of(model, request), logits[-1], **CLOSE)
    fusion = dataclasses.replace(request, method=METHODS["primed_fusion"].with_ratio(1))
    np.testing.assert_allclose(logits_of(model, fusion), llama.run(prompt.ids)[0][-1], **CLOSE)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_kv_of_vectors_is_what_these_vectors_are(tiny_config, parts, family):
    """The start of a run: chunks behind it have the KV that they have behind the vectors."""
    model = random_model(tiny_config(family), seed=4, cache_tokens=2048)
    prefix, *chunks, _ = parts
    store = MemoryStore(derive(model.fingerprint, salt=f"start {family}"), model.kv_layout)
    vectors = np.asarray(model.params.embed)[20:26].astype(np.float32)
    found = [
        encoded(model, store, prefix, chunks, it)
        for it in (vectors, start_layers(model, prefix, vectors))
    ]
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, **CLOSE)


def test_on_a_mesh_as_on_one_device(tiny_config, parts):
    prefix, *chunks, _ = parts
    found = []
    for mesh in (None, make_mesh(2, 1, 2)):
        model = random_model(tiny_config("llama"), seed=4, mesh=mesh, cache_tokens=2048)
        store = MemoryStore(derive(model.fingerprint, salt="mesh"), model.kv_layout)
        found.append(encoded(model, store, prefix, chunks, given_for(model)))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, **CLOSE)


def test_each_has_a_key_of_its_own_and_is_in_no_prompt(model, parts, given, store):
    prefix, *chunks, final = parts
    prompt, keys = Prompt(prefix, tuple(chunks), final), []
    flat = given.reshape(COUNT, -1)
    for one in (given, given + 1, given[::-1].copy(), flat):
        made = sequence_of(model, Request(prompt, store, PRIMED, 4, primer=one))
        assert made.num_tokens == prompt.num_tokens
        keys.append(tuple(part.load.key for part in made.parts))
    prefixes, *rest = zip(*keys, strict=True)
    assert len(set(prefixes)) == 1
    assert all(len(set(it)) == 4 for it in rest)


def test_it_travels_between_the_processes_of_a_mesh(parts, given, store):
    prefix, *chunks, final = parts
    request = Request(Prompt(prefix, tuple(chunks), final), store, PRIMED, 4, primer=given)
    table = json.loads(json.dumps(wire.request_table(request)))
    np.testing.assert_array_equal(wire.request_of(table, store).primer, given)


@pytest.fixture
def trained(text_model, tmp_path):
    """A primer, and its file."""
    vectors = PrimerVectors.of(text_model.digest, given_for(text_model))
    primer, path = Primer("mine", vectors=vectors), tmp_path / "mine.safetensors"
    write_vectors(primer, path)
    return primer, path


def test_a_file_is_read_as_it_was_written(text_model, trained):
    primer, path = trained
    c = text_model.config
    tensors = load_file(path)
    assert {name: it.shape for name, it in tensors.items()} == dict.fromkeys(
        ("keys", "values"), (c.num_layers, COUNT, c.num_kv_heads, c.head_dim)
    )
    assert primer_named(str(path)) == primer and not primer.wraps
    assert primer_from_dict(primer.to_dict(), "there") == primer
    np.testing.assert_array_equal(primer.vectors.array(), given_for(text_model))
    primer.check_model(text_model.digest, c)


def test_documents_and_a_knowledge_base_are_read_behind_it(text_model, trained, tmp_path):
    primer, path = trained
    text = "the mill stands by the weir. a mule rests beside the salt."
    method = dataclasses.replace(PRIMED, primer=str(path))
    asked = {"model": text_model, "documents": [text], "max_new_tokens": 3}
    one, again = (generate("where is the mill?", method=method, **asked) for _ in range(2))
    assert one.counts["encoded"] > 0 == again.counts["encoded"]
    assert one.token_ids == again.token_ids
    with KnowledgeBase.open(
        tmp_path / "kb", text_model, encoders=["primed"], primer=str(path)
    ) as kb:
        kb.add([{"id": "a", "text": text}])
        assert kb.primer == primer and kb.verify().whole
    path.unlink()
    with KnowledgeBase.open(tmp_path / "kb", text_model) as kb:
        assert kb.primer == primer
        found = generate("where is the mill?", kb=kb, method="primed", k=1, max_new_tokens=3)
        assert found.counts["encoded"] == 0 < found.counts["reused"]


def test_foreign_and_damaged_files_are_refused_in_one_line(text_model, trained, tmp_path):
    primer, path = trained
    c = text_model.config
    wide = dataclasses.replace(c, head_dim=2 * c.head_dim)
    for digest, config in (("0" * 64, c), (text_model.digest, wide)):
        with refused(ConfigError, "mine", "jaxrag train primer"):
            primer.check_model(digest, config)
    about = {"format": "jaxrag.primer", "model": text_model.digest}
    tensors = load_file(path)
    other = tmp_path / "other.safetensors"
    for changed in (
        {"keys": tensors["keys"][0]},
        {"values": tensors["values"][:1]},
        {"keys": tensors["keys"].astype(np.float16)},
        {name: it[:, :0] for name, it in tensors.items()},
        {"keys": tensors["keys"] * np.nan},
        {"more": tensors["keys"]},
    ):
        save_file(tensors | changed, str(other), metadata=about)
        with refused(ConfigError, "other"):
            primer_named(str(other))
    for changes in ({"layers": (1, 2, 3, 4)}, {"header": 2}):
        with refused(ConfigError, "mine"):
            Primer("mine", vectors=dataclasses.replace(primer.vectors, **changes))


def test_what_does_not_fit_is_refused_in_one_line(text_model, trained, parts, store, tmp_path):
    primer, path = trained
    packets = dataclasses.replace(METHODS["packets"], primer=str(path))
    asked = {"model": text_model, "documents": ["by the weir."], "max_new_tokens": 2}
    with refused(RequestError, "'mine' is not packets", "--form packets"):
        generate("where?", method=packets, **asked)
    with refused(RequestError, "'packets'", "[R, D]"):
        ChunkEncoding(text_model, store, parts[0], primer=primer.vectors.array()).key(
            "packets", parts[1]
        )
    count = text_model.config.max_positions
    long = PrimerVectors.of(text_model.digest, given_for(text_model, count))
    write_vectors(Primer("long", vectors=long), tmp_path / "long.safetensors")
    named = str(tmp_path / "long.safetensors")
    with refused(RequestError, "'long'", count):
        generate("where?", method=dataclasses.replace(PRIMED, primer=named), **asked)
    with refused(KnowledgeBaseError, "'long'", count):
        KnowledgeBase.open(tmp_path / "kb", text_model, encoders=["primed"], primer=named)
    with refused(RequestError, count):
        start_layers(text_model, parts[0], np.zeros((count, text_model.config.model_dim)))
