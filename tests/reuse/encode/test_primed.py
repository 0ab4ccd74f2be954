"""Chunks behind a primer: by numpy from the definition, through the engine, and law 19."""

import dataclasses

import numpy as np
import pytest
from numpy_llama import CLOSE, Llama, logits_of
from refusal import refused

from jaxrag.base.errors import ConfigError, RequestError
from jaxrag.base.installed import config_names
from jaxrag.engine.engine import engine_of
from jaxrag.engine.mapping import sequence_of
from jaxrag.engine.prompt_inspection import inspect_prompts
from jaxrag.engine.request import Prompt, Request
from jaxrag.kv.store import MemoryStore, derive
from jaxrag.models.model import random_model
from jaxrag.models.text.prompts import TEMPLATES
from jaxrag.reuse.encode import ChunkEncoding, ChunkInContext, Primer, encode_chunks, primer_named
from jaxrag.reuse.encode.primer import (
    PrimerPassage,
    PrimerVectors,
    default_primer,
    primer_from_dict,
    write_vectors,
)
from jaxrag.reuse.methods import METHODS
from jaxrag.reuse.names import DEFAULT_PRIMER

PRIMED, FUSION = METHODS["primed"], METHODS["primed_fusion"]


@pytest.fixture(scope="module")
def model(tiny_config):
    return random_model(tiny_config("llama"), seed=4, cache_tokens=2048)


@pytest.fixture(scope="module")
def parts():
    """Prefix, primer, two chunks and the final block."""
    rng = np.random.default_rng(8)
    return [rng.integers(3, 101, n).astype(np.int32) for n in (5, 19, 14, 9, 7)]


@pytest.fixture
def store(model, request):
    """Its chunks are no other test's, in the pool neither."""
    return MemoryStore(derive(model.fingerprint, salt=request.node.name), model.kv_layout)


def test_by_numpy_kv_and_answers_are_those_of_the_definition(model, parts, store):
    """Prefix, primer and chunk in a row; of that the chunk's KV, at its place in the prompt."""
    prefix, primer, *chunks, final = parts
    llama, before = Llama(model), len(prefix) + len(primer)
    expected = [llama.run(np.concatenate((prefix, primer, it)))[1][:, :, before:] for it in chunks]
    encoding = ChunkEncoding(model, store, prefix, primer=primer)
    wanted = {encoding.key("primed", it): ChunkInContext(it) for it in chunks}
    for made, kv in zip(
        sorted(encoding.encode("primed", wanted), key=lambda it: list(wanted).index(it.key)),
        expected,
        strict=True,
    ):
        np.testing.assert_allclose(made.kv, kv, **CLOSE)
    prompt = Prompt(prefix, tuple(chunks), final)
    stored = np.concatenate(expected, axis=2)
    logits, _ = llama.run(prompt.ids, stored, len(prefix))
    request = Request(prompt, store, PRIMED, 4, primer=primer)
    np.testing.assert_allclose(logits_of(model, request), logits[-1], **CLOSE)
    first = llama.run(np.concatenate((prefix, chunks[0])))[1][:, :, len(prefix) :]
    stored = np.concatenate((first, expected[1]), axis=2)
    logits, _ = llama.run(prompt.ids, stored, len(prefix))
    led = dataclasses.replace(PRIMED, first_encoder="after_prefix")
    request = dataclasses.replace(request, method=led)
    np.testing.assert_allclose(logits_of(model, request), logits[-1], **CLOSE)
    request = dataclasses.replace(request, method=FUSION.with_ratio(1))
    np.testing.assert_allclose(logits_of(model, request), llama.run(prompt.ids)[0][-1], **CLOSE)


@pytest.mark.parametrize("apart", [False, True])
def test_law_19_an_empty_primer_is_after_prefix(model, parts, store, apart):
    """Bit for bit, its exact first chunk too; and its key is another."""
    prefix, _, *chunks, final = parts
    encoding = ChunkEncoding(model, store, prefix, apart=apart, primer=prefix[:0])
    made = {}
    for encoder in ("after_prefix", "primed"):
        wanted = {encoding.key(encoder, it): ChunkInContext(it) for it in chunks}
        made[encoder] = {it.chunk.ids.tobytes(): it for it in encoding.encode(encoder, wanted)}
    for one, other in zip(*(it.values() for it in made.values()), strict=True):
        np.testing.assert_array_equal(one.kv, other.kv)
        assert one.key != other.key
    prompt = Prompt(prefix, tuple(chunks), final)
    fusion = dataclasses.replace(FUSION, encoder="after_prefix")
    for plain, own in ((METHODS["full_reuse"], PRIMED), (fusion, FUSION)):
        found = [
            logits_of(model, Request(prompt, store, method, 4, primer=prefix[:0]))
            for method in (plain, own)
        ]
        np.testing.assert_array_equal(*found)


def test_law_19_the_primer_is_in_the_key_and_in_no_prompt(model, parts, store):
    prefix, primer, *chunks, final = parts
    prompt = Prompt(prefix, tuple(chunks), final)
    keys = []
    for one in (primer, primer[:-1], prefix[:0]):
        request = Request(prompt, store, PRIMED, 4, primer=one)
        made = sequence_of(model, request)
        assert made.num_tokens == prompt.num_tokens
        assert not any(len(primer) == len(part.ids) for part in made.parts)
        keys.append(tuple(part.load.key for part in made.parts))
    prefixes, *rest = zip(*keys, strict=True)
    assert len(set(prefixes)) == 1  # it stands in front of the primer
    assert all(len(set(it)) == 3 for it in rest)


def test_law_19_no_token_after_the_encoder_sees_the_primer(model, parts, store):
    """With the same stored KV under their keys, two primers give the same logits."""
    prefix, primer, *chunks, final = parts
    prompt, found = Prompt(prefix, tuple(chunks), final), []
    one, other = (
        ChunkEncoding(model, store, prefix, primer=it) for it in (primer, primer[::-1].copy())
    )
    wanted = {one.key("primed", it): ChunkInContext(it) for it in chunks}
    for made in one.encode("primed", wanted):
        store.put(**made.for_store())
        key = other.key("primed", made.chunk.ids)
        record = other.provenance("primed", made.chunk)
        store.put(**dataclasses.replace(made, key=key, record=record).for_store())
    for it in (one, other):
        found.append(logits_of(model, Request(prompt, store, FUSION, 4, primer=it.primer)))
    np.testing.assert_array_equal(*found)


def test_what_has_no_primer_is_refused(model, parts, store):
    prefix, primer, *chunks, final = parts
    with refused(RequestError, "'primed'", "primer="):
        Request(Prompt(prefix, tuple(chunks), final), store, PRIMED, 4)
    with refused(RequestError, "'primed'", "primer="):
        ChunkEncoding(model, store, prefix).key("primed", chunks[0])
    long = np.tile(primer, 40)
    with refused(RequestError, len(prefix) + len(long)):
        list(encode_chunks(model, "primed", np.concatenate((prefix, long)), chunks))


def test_a_miss_says_under_which_encoders_the_store_has_it(model, parts, store):
    """Also where no primer is known, so that its own key is none."""
    prefix, primer, *chunks, final = parts
    encoding = ChunkEncoding(model, store, prefix, primer=primer)
    encoding.encode_missing(
        "primed", {encoding.key("primed", chunks[0]): ChunkInContext(chunks[0])}
    )
    prompt = Prompt(prefix, (chunks[0],), final)
    for own, said in ((primer, "under primed"), (None, "not in the store")):
        engine_of(model).forget()
        request = Request(prompt, store, METHODS["full_reuse"], 4, primer=own)
        [why] = inspect_prompts(
            engine_of(model), [request], lambda runner, state, there: state.parts[1].origin.why
        )
        assert said in why
        store.delete([encoding.key("after_prefix", chunks[0])])


SHIPPED = config_names("primers")


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_primers_are_whole_passages(name):
    primer = primer_named(name)
    assert primer.name == name and 2 <= len(primer.passages) <= 3
    for it in primer.passages:
        assert it.title and it.text == it.text.strip() and it.text.endswith(".")
        assert 100 <= len(it.text.split()) <= 150


def test_there_are_several_and_a_default():
    assert len(SHIPPED) >= 3 and DEFAULT_PRIMER in SHIPPED


def test_a_primer_is_in_the_chunk_template(text_model):
    tokenizer, template = text_model.text_tokenizer(), TEMPLATES["block_attention"]
    primer = Primer("two", (PrimerPassage("Mills", "Water turns."), PrimerPassage("", "It falls.")))
    chunks = [
        template.chunk_ids(tokenizer, tokenizer.encode(it.text), it.title) for it in primer.passages
    ]
    found = primer.tokens(template, tokenizer)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, np.concatenate(chunks))


def test_what_is_no_primer_is_refused(tmp_path):
    with refused(ConfigError, "lighthouse", DEFAULT_PRIMER):
        primer_named("lighthouse")
    for text in ("", "passages = []", '[[passages]]\ntitle = "a"\ntext = " "'):
        path = tmp_path / "none.toml"
        path.write_text(text)
        with refused(ConfigError, "none" if text else "passages"):
            primer_named(str(path))


def vectors_of(model, ids):
    return np.asarray(model.params.embed)[ids].astype(np.float32)


def test_vectors_that_are_a_texts_embeddings_are_that_text(model, parts, store):
    """The same KV, and the same answers; but another key, as nobody knows."""
    prefix, primer, *chunks, final = parts
    found, keys = [], []
    for given in (primer, vectors_of(model, primer)):
        encoding = ChunkEncoding(model, store, prefix, primer=given)
        wanted = {encoding.key("primed", it): ChunkInContext(it) for it in chunks}
        encoding.encode_missing("primed", wanted)
        keys.append(set(wanted))
        request = Request(Prompt(prefix, tuple(chunks), final), store, PRIMED, 1, primer=given)
        found.append((*map(store.get, wanted), logits_of(model, request)))
    assert keys[0].isdisjoint(keys[1])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, **CLOSE)


def test_ids_that_are_embedded_nowhere_are_refused(model, parts):
    prefix, *chunks = parts
    beyond = np.array([model.config.vocab_size], np.int32)
    with refused(RequestError, f"token id {beyond[0]}"):
        list(encode_chunks(model, "after_prefix", np.concatenate((prefix, beyond)), chunks))


@pytest.fixture
def trained(model, tmp_path):
    """A primer of vectors, and its file."""
    vectors = PrimerVectors.of(model.digest, vectors_of(model, np.arange(20, 26)))
    primer, path = Primer("mine", vectors=vectors), tmp_path / "mine.safetensors"
    write_vectors(primer, path)
    return primer, path


def test_a_file_of_vectors_is_read_as_it_was_written(model, trained):
    primer, path = trained
    assert primer_named(str(path)) == primer
    assert primer_from_dict(primer.to_dict(), "there") == primer
    assert primer.to_dict().keys() == {"name", "vectors"}
    assert default_primer().to_dict().keys() == {"name", "passages"}
    np.testing.assert_array_equal(
        primer.tokens(TEMPLATES["plain"], None), vectors_of(model, np.arange(20, 26))
    )
    primer.check_model(model.digest, model.config)


def test_foreign_and_damaged_vectors_are_refused_in_one_line(model, trained, tmp_path):
    primer, path = trained
    narrow = dataclasses.replace(model.config, model_dim=8)
    for digest, config in (("0" * 64, model.config), (model.digest, narrow)):
        with refused(ConfigError, "mine", "jaxrag train primer"):
            primer.check_model(digest, config)
    for text in (b"", b"{}", path.read_bytes()[:-9]):
        other = tmp_path / "other.safetensors"
        other.write_bytes(text)
        with refused(ConfigError, "other.safetensors"):
            primer_named(str(other))
    with refused(ConfigError, "missing.safetensors"):
        primer_named(str(tmp_path / "missing.safetensors"))
    for values in ({"values": "!"}, {"width": 5}, {"values": ""}):
        with refused(ConfigError, "mine"):
            Primer("mine", vectors=dataclasses.replace(primer.vectors, **values))
