"""Trained vectors around chunks, which stay in prompts: by numpy from the definition, and keys."""

import dataclasses

import numpy as np
import pytest
from numpy_llama import CLOSE, Llama, logits_of
from refusal import refused

from jaxrag import KnowledgeBase, SamplingParams, generate
from jaxrag.base.errors import ConfigError, KnowledgeBaseError, RequestError
from jaxrag.engine.engine import engine_of
from jaxrag.engine.mapping import sequence_of
from jaxrag.engine.request import Prompt, Request
from jaxrag.kv.store import MemoryStore, derive
from jaxrag.models.model import random_model
from jaxrag.reuse.encode import (
    ChunkEncoding,
    ChunkInContext,
    Primer,
    encode_chunks,
    primer_from_dict,
    primer_named,
    wrapped,
)
from jaxrag.reuse.encode.primer import PrimerVectors, write_vectors
from jaxrag.reuse.methods import METHODS, method_named
from jaxrag.serve.ask import Ask
from jaxrag.serve.conversation import shown_prompt
from jaxrag.serve.questions import prepare, resolve
from jaxrag.server.settings import ServerSettings
from jaxrag.server.state.state import offered_methods

PACKETS = METHODS["packets"]
HEADER, COUNT = 3, 5


@pytest.fixture(scope="module")
def model(tiny_config):
    return random_model(tiny_config("llama"), seed=4, cache_tokens=2048)


@pytest.fixture(scope="module")
def vectors(model):
    """[5, D] float32, of no token."""
    rng = np.random.default_rng(9)
    return rng.normal(size=(COUNT, model.config.model_dim)).astype(np.float32)


@pytest.fixture(scope="module")
def parts():
    """Prefix, two chunks and the final block."""
    rng = np.random.default_rng(8)
    return [rng.integers(3, 101, n).astype(np.int32) for n in (5, 14, 9, 7)]


@pytest.fixture
def store(model, request):
    """Its chunks are no other test's, in the pool neither."""
    return MemoryStore(derive(model.fingerprint, salt=request.node.name), model.kv_layout)


def prompt_of(model, parts):
    prefix, *chunks, final = parts
    return Prompt(prefix, tuple(chunks), final).in_packets(model.config.vocab_size, HEADER, COUNT)


def written(model, vectors, path, header=HEADER):
    """The path of a file of packets."""
    found = PrimerVectors.of(model.digest, vectors, header)
    write_vectors(Primer(path.stem, vectors=found), path)
    return str(path)


def test_by_numpy_kv_and_answers_are_those_of_the_definition(model, parts, vectors, store):
    """Prefix, header, chunk and trailer in a row; of that all but the prefix, at its place."""
    prompt, llama = prompt_of(model, parts), Llama(model)
    size, before = model.config.vocab_size, len(parts[0])
    assert [len(it) for it in prompt.chunks] == [14 + COUNT, 9 + COUNT]
    llama.params |= {
        "lm_head": llama.params.get("lm_head", llama.params["embed"].T),
        "embed": np.concatenate((llama.params["embed"], vectors)),
    }
    rows = [np.concatenate((prompt.prefix, it)) for it in prompt.chunks]
    assert (rows[0][before:][:HEADER] == size + np.arange(HEADER)).all()
    assert (rows[0][HEADER - COUNT :] == size + np.arange(HEADER, COUNT)).all()
    expected = [llama.run(row)[1][:, :, before:] for row in rows]
    encoding = ChunkEncoding(model, store, prompt.prefix, primer=vectors)
    wanted = {encoding.key("packets", it): ChunkInContext(it) for it in prompt.chunks}
    made = {it.key: it.kv for it in encoding.encode("packets", wanted)}
    for key, kv in zip(wanted, expected, strict=True):
        np.testing.assert_allclose(made[key], kv, **CLOSE)
    logits, _ = llama.run(prompt.ids, np.concatenate(expected, axis=2), before)
    found = logits_of(model, Request(prompt, store, PACKETS, 4, primer=vectors))
    np.testing.assert_allclose(found, logits[-1], **CLOSE)
    bare = Prompt(prompt.prefix, tuple(parts[1:-1]), prompt.final)
    plain = logits_of(model, Request(bare, store, METHODS["full_reuse"], 4))
    assert np.abs(found - plain).max() > 1e-2  # the vectors are seen


def test_packets_share_no_kv(model, parts, vectors, store):
    prompt, keys = prompt_of(model, parts), []
    for held in (vectors, vectors + 1, vectors[::-1].copy()):
        made = sequence_of(model, Request(prompt, store, PACKETS, 4, primer=held))
        keys.append([part.load.key for part in made.parts])
        assert made.num_tokens == prompt.num_tokens
    moved = [wrapped(it, model.config.vocab_size, 2, COUNT) for it in parts[1:-1]]
    other = dataclasses.replace(prompt, chunks=tuple(moved))
    made = sequence_of(model, Request(other, store, PACKETS, 4, primer=vectors))
    keys.append([part.load.key for part in made.parts])
    prefixes, *rest = zip(*keys, strict=True)
    assert len(set(prefixes)) == 1 and all(len(set(it)) == 4 for it in rest)


def test_documents_are_asked_about_between_the_vectors_of_a_file(text_model, tmp_path):
    table = np.asarray(text_model.params.embed).astype(np.float32)
    path = written(text_model, table[20:25], tmp_path / "p.safetensors")
    assert primer_named(path).wraps
    method = dataclasses.replace(PACKETS, primer=path)
    documents = ["the mill stands by the weir.", "a mule rests beside the salt."]
    settings = resolve(Ask(method=method, max_new_tokens=3), model=text_model)
    ready = prepare(settings, "where is the mill?", documents)
    plain = resolve(Ask(method="full_reuse", max_new_tokens=3), model=text_model)
    bare = prepare(plain, "where is the mill?", documents).prompt
    size = text_model.config.vocab_size
    for one, other in zip(ready.prompt.chunks, bare.chunks, strict=True):
        np.testing.assert_array_equal(one, wrapped(other, size, HEADER, COUNT))
    shown, other = (shown_prompt(text_model, it) for it in (ready.prompt, bare))
    assert [it["text"] for it in shown] == [it["text"] for it in other]
    sampling = SamplingParams(repetition_penalty=1.2)  # which looks at the prompt's ids
    for expected in (2, 0):
        found = generate(
            "where is the mill?", documents=documents, model=text_model, method=method,
            max_new_tokens=3, sampling=sampling, cite="spans",
        )  # fmt: skip
        whole = sum(map(len, ready.prompt.chunks))
        assert found.counts["encoded"] == (whole if expected else 0), found.counts
    toml = tmp_path / "mine.toml"
    toml.write_text('encoder = "packets"\nprimer = "p.safetensors"\n')
    assert method_named(str(toml)).primer == path


def test_a_conversation_goes_on_behind_packets(text_model, tmp_path):
    table = np.asarray(text_model.params.embed).astype(np.float32)
    path = written(text_model, table[30:35], tmp_path / "p.safetensors")
    method = dataclasses.replace(PACKETS, primer=path)
    messages = [
        {"role": "user", "content": "where is the mill?"},
        {"role": "assistant", "content": "by the weir"},
        {"role": "user", "content": "where is the mule?"},
    ]
    options = {"documents": ["the mill stands by the weir."], "method": method, "max_new_tokens": 3}
    for turns in ("exact", "blocks"):
        asked = {**options, "messages": messages, "earlier_turns": turns}
        one, again = (generate(model=text_model, **asked) for _ in range(2))
        engine_of(text_model).forget()
        cold = generate(model=text_model, **asked)
        assert one.token_ids == again.token_ids == cold.token_ids


def test_a_file_is_read_as_it_was_written(model, vectors, tmp_path):
    for header in (0, 2, COUNT):
        path = written(model, vectors, tmp_path / "p.safetensors", header)
        found = primer_named(path)
        assert found.wraps and found.vectors.header == header
        np.testing.assert_array_equal(found.vectors.array(), vectors)
        assert primer_from_dict(found.to_dict(), "there") == found
    assert not found.same(Primer("p", vectors=PrimerVectors.of(model.digest, vectors)))
    with refused(ConfigError, "p", f"header={COUNT + 1}"):
        written(model, vectors, tmp_path / "p.safetensors", COUNT + 1)


def test_what_is_foreign_or_no_packets_is_refused_in_one_line(text_model, vectors, tmp_path):
    table = np.asarray(text_model.params.embed).astype(np.float32)
    mine = written(text_model, table[:4], tmp_path / "mine.safetensors", 2)
    foreign = dataclasses.replace(PrimerVectors.of("0" * 64, table[:4], 2))
    write_vectors(Primer("foreign", vectors=foreign), tmp_path / "foreign.safetensors")
    narrow = written(text_model, vectors[:, :3], tmp_path / "narrow.safetensors", 2)
    plain = PrimerVectors.of(text_model.digest, table[:4])
    write_vectors(Primer("plain", vectors=plain), tmp_path / "plain.safetensors")
    documents = ["the mill stands by the weir."]

    def ask(method="packets", primer=None, **more):
        asked = dataclasses.replace(METHODS[method], primer=primer)
        given = {"model": text_model, "documents": documents, **more}
        return generate("where?", method=asked, max_new_tokens=2, **given)

    for method, primer, words in (
        ("packets", None, ("'packets'", "not packets", "--form packets")),
        ("packets", str(tmp_path / "plain.safetensors"), ("'plain' is not packets",)),
        ("primed", mine, ("'primed'", "'mine' is packets", "--form primer")),
    ):
        with refused(RequestError, *words):
            ask(method, primer)
    for primer in (str(tmp_path / "foreign.safetensors"), narrow):
        with refused(ConfigError, "jaxrag train primer"):
            ask(primer=primer)
    long = written(text_model, np.resize(table, (1024, table.shape[1])), tmp_path / "l.safetensors")
    with refused(RequestError, "1024"):
        ask(primer=long)
    with KnowledgeBase.open(tmp_path / "kb", text_model, encoders=["isolated"]) as kb:
        kb.add([{"id": "a", "text": documents[0]}])
        with refused(RequestError, "'packets'", "knowledge base"):
            ask(primer=mine, kb=kb, documents=None, model=None)
    with refused(KnowledgeBaseError, "keeps no packets"):
        KnowledgeBase.open(tmp_path / "new", text_model, encoders=["packets"], primer=mine)
    with refused(KnowledgeBaseError, "keeps no packets"):
        KnowledgeBase.open(tmp_path / "new", text_model, encoders=["primed"], primer=mine)
    assert not (tmp_path / "new").exists()
    toml = tmp_path / "mine.toml"
    toml.write_text('encoder = "packets"\nprimer = "mine.safetensors"\n')
    with refused(ConfigError, "'mine'", "server"):
        offered_methods(ServerSettings(method=str(toml)), text_model, None)


def test_what_only_the_encoder_reads_goes_with_nothing_else(model, parts, vectors, store):
    prompt = prompt_of(model, parts)
    for changes in (
        {"misses": "in_place"},
        {"prefix_cache": True},
        {"first_encoder": "after_prefix"},
        {"selector": METHODS["epic"].selector},
    ):
        with refused(RequestError, "'packets'", "no selector"):
            dataclasses.replace(PACKETS, **changes)
    for held, words in ((None, "primer="), (parts[1], "[R, D]")):
        with refused(RequestError, "'packets'", words):
            Request(prompt, store, PACKETS, 4, primer=held)
        with refused(RequestError, "'packets'", words):
            ChunkEncoding(model, store, parts[0], primer=held).key("packets", parts[1])
    beyond = wrapped(parts[1], model.config.vocab_size, 1, COUNT + 1)
    soft = model.with_soft(vectors)
    with refused(RequestError, f"token id {beyond.max()}"):
        list(encode_chunks(soft, "packets", parts[0], [beyond]))
