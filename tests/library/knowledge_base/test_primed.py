"""A knowledge base whose chunks are encoded behind a primer."""

import dataclasses
import json
import sqlite3

import numpy as np
import pytest
from refusal import refused

import jaxrag
from jaxrag import Document, KnowledgeBase
from jaxrag.base.errors import ConfigError, DamagedCatalogError, KnowledgeBaseError, RequestError
from jaxrag.connectors.manifest import read
from jaxrag.connectors.plan import Planner
from jaxrag.engine.engine import engine_of
from jaxrag.kv.store import Record
from jaxrag.library.knowledge_base.location import mend_settings
from jaxrag.reuse.encode import ChunkEncoding, Primer, chunk_key
from jaxrag.reuse.encode.primer import PrimerPassage, PrimerVectors, primer_named, write_vectors
from jaxrag.reuse.methods import METHODS
from jaxrag.serve.ask import Ask
from jaxrag.serve.compatibility import suiting
from jaxrag.serve.connector import write_connector
from jaxrag.serve.questions import prepare, resolve
from jaxrag.server.state.recipe import recipe_like

OWN = Primer("own", (PrimerPassage("Weir", "A weir holds back water."), PrimerPassage("", "Mud.")))
VECTORS = np.random.default_rng(5).normal(size=(7, 80)).astype(np.float32) / 8
OTHER = Primer("other", (PrimerPassage("Weir", "A weir is a low wall."),))
TEXT = " ".join(f"the mill of part {i} stands by the weir and grinds." for i in range(12))


@pytest.fixture
def opened(text_model, tmp_path):
    """``opened(**settings)``: a knowledge base of chunks of 60 tokens."""

    def call(name="kb", model=text_model, **settings):
        new = {"encoders": ["primed"], "chunk_tokens": 60} if settings.pop("new", True) else {}
        return KnowledgeBase.open(tmp_path / name, model=model, **new | settings)

    return call


@pytest.fixture
def trained(text_model, tmp_path):
    """The file of vectors for the model."""
    path, width = tmp_path / "trained.safetensors", text_model.config.model_dim
    vectors = PrimerVectors.of(text_model.digest, np.resize(VECTORS, (7, width)))
    write_vectors(Primer("trained", vectors=vectors), path)
    return path


def keys_of(kb):
    return {name: kb.store.find([name])[name] for name in list(kb.store.keys())}


def test_its_primer_is_kept_as_a_whole(opened, text_model):
    with opened(primer=OWN) as kb:
        kb.add([Document(id="a", text=TEXT)])
        assert kb.primer == OWN and kb.stats()["primer"] == "own"
        tokenizer, chunk = text_model.text_tokenizer(), kb.chunks_of("a")[1]
        ids = kb.template.chunk_ids(tokenizer, chunk.ids, chunk.title)
        primer, prefix = OWN.tokens(kb.template, tokenizer), kb.template.prefix_ids(tokenizer)
        key = chunk_key(kb.store.fingerprint, text_model, "primed", prefix, ids, None, primer)
        assert isinstance(kb.store.find([key])[key], Record)
        assert kb.verify().whole
    with opened(new=False) as again:
        assert again.primer == OWN
        report = again.add([Document(id="a", text=TEXT)])
        assert report.encoded == 0
    with opened(primer=dataclasses.replace(OWN, name="alias"), new=False) as again:
        assert again.primer == OWN


def test_without_one_the_default_is_taken(opened, text_model, tmp_path):
    with opened(chunk_tokens=20, template="plain") as kb:
        assert kb.primer.name == "bakery"


def test_a_base_without_primer_keeps_its_form(opened):
    with opened(encoders=["after_prefix"]) as kb:
        assert kb.primer is None and "primer" not in kb._settings and "primer" not in kb.stats()
    with opened(new=False, encoders=["primed"], primer=OTHER) as kb:
        assert kb.primer == OTHER and kb.encoders == ("after_prefix", "primed")
        kb.add([Document(id="a", text=TEXT)])
        assert kb.verify().whole


def test_what_does_not_fit_is_refused(opened, tmp_path):
    with opened(primer=OWN):
        pass
    with refused(KnowledgeBaseError, "'own'", "'other'"):
        opened(new=False, primer=OTHER)
    with refused(KnowledgeBaseError, "'own'", "called the same"):
        opened(new=False, primer=dataclasses.replace(OTHER, name="own"))
    with refused(KnowledgeBaseError, "'own'", "'primed'"):
        opened("plain", encoders=["isolated"], primer=OWN)
    with opened("isolated", encoders=["isolated"]):
        pass
    with refused(KnowledgeBaseError, "'own'", "'primed'"):
        opened("isolated", new=False, primer=OWN)
    with refused(ConfigError, "'lighthouse'", "bakery"):
        opened("none", primer="lighthouse")
    with refused(RequestError, "primer=3"):
        opened("none", primer=3)
    long = Primer("long", (PrimerPassage("", "a weir " * 900),))
    with refused(KnowledgeBaseError, "'long'", 1024):
        opened("none", primer=long)
    with refused(KnowledgeBaseError, "'long'", 1024):
        opened("isolated", new=False, encoders=["primed"], primer=long)
    assert not (tmp_path / "none").exists() and not (tmp_path / "plain").exists()


def test_answers_use_it_and_never_what_is_stored(opened, text_model, tmp_path):
    """Law 16: warm is cold; given documents are encoded behind it, too."""
    question = {"question": "where is the mill?", "k": 3, "max_new_tokens": 6}
    with opened(primer=OWN, stored="native") as kb:
        kb.add([Document(id="a", text=TEXT)])
        assert {"primed", "primed_fusion"} <= set(suiting(kb, text_model))
        for method in ("primed", "primed_fusion"):
            engine_of(text_model).forget()
            warm = jaxrag.generate(kb=kb, method=method, **question)
            assert warm.counts["encoded"] == 0 < warm.counts["reused"]
            assert (warm.counts["recomputed"] > 0) == (method == "primed_fusion")
            texts = [source.text for source in warm.sources]
            given = jaxrag.generate(kb=kb, method=method, documents=texts, **question)
            assert given.token_ids == warm.token_ids
    with opened("cold", encoders=["isolated"], stored="native") as kb:
        kb.add([Document(id="a", text=TEXT)])
        engine_of(text_model).forget()
        method = dataclasses.replace(METHODS["primed_fusion"], primer=written(OWN, tmp_path))
        cold = jaxrag.generate(kb=kb, method=method, **question)
        assert cold.counts["encoded"] > 0 and cold.token_ids == warm.token_ids


def written(primer, folder):
    """The file of a primer."""
    path = folder / f"{primer.name}.toml"
    passages = (
        f"[[passages]]\ntitle = {json.dumps(it.title)}\ntext = {json.dumps(it.text)}\n"
        for it in primer.passages
    )
    path.write_text("".join(passages))
    return str(path)


def test_a_method_names_no_other_primer(opened, text_model, tmp_path):
    primed = METHODS["primed"]
    other = dataclasses.replace(primed, primer=written(OTHER, tmp_path))
    with opened(primer=OWN) as kb:
        with refused(RequestError, "other.toml", "'own'"):
            resolve(Ask(method=other), kb=kb)
        own = dataclasses.replace(primed, primer=written(OWN, tmp_path))
        assert resolve(Ask(method=own), kb=kb).primer == OWN
        assert resolve(Ask(method="cacheblend"), kb=kb).primer is None
    with refused(RequestError, "other.toml", "'cacheblend'"):
        dataclasses.replace(METHODS["cacheblend"], primer="other.toml")
    (tmp_path / "near.toml").write_text('encoder = "primed"\nprimer = "other.toml"\n')
    assert resolve(Ask(method=str(tmp_path / "near.toml")), model=text_model).primer == OTHER
    long = Primer("long", (PrimerPassage("", "a weir " * 900),))
    method = dataclasses.replace(primed, primer=written(long, tmp_path))
    settings = resolve(Ask(method=method), model=text_model)
    with refused(RequestError, "'long'", 1024):
        prepare(settings, "where?", ["the mill stands by the weir"])


def test_vectors_are_kept_and_answer_as_a_text_does(opened, text_model, trained):
    """Laws 16 and 19: warm is cold, under any ratio; and the file may go."""
    question = {"question": "where is the mill?", "k": 3, "max_new_tokens": 6}
    held = primer_named(str(trained))
    method = dataclasses.replace(METHODS["primed"], primer=str(trained))
    with opened("cold", encoders=["isolated"], stored="native") as kb:
        kb.add([Document(id="a", text=TEXT)])
        cold = jaxrag.generate(kb=kb, method=method, **question)
        assert cold.counts["encoded"] > 0
    with opened(primer=str(trained), stored="native") as kb:
        kb.add([Document(id="a", text=TEXT)])
        assert kb.primer == held and kb.stats()["primer"] == "trained"
        assert kb.verify().whole
    trained.unlink()
    with opened(new=False) as kb:
        assert kb.primer == held
        engine_of(text_model).forget()
        warm = jaxrag.generate(kb=kb, method="primed", **question)
        assert warm.counts["encoded"] == 0 < warm.counts["reused"]
        assert warm.token_ids == cold.token_ids
        full = jaxrag.generate(kb=kb, method="full_attention", **question)
        again = jaxrag.generate(kb=kb, method="primed_fusion", recompute_ratio=1.0, **question)
        assert again.token_ids == full.token_ids


def test_vectors_of_another_model_are_refused_before_anything_is_made(
    opened, text_model, trained, tmp_path
):
    foreign = dataclasses.replace(text_model, digest="0" * 64)
    with refused(ConfigError, "'trained'", "jaxrag train primer"):
        opened("none", model=foreign, primer=str(trained))
    assert not (tmp_path / "none").exists()
    method = dataclasses.replace(METHODS["primed"], primer=str(trained))
    with refused(ConfigError, "'trained'", "jaxrag train primer"):
        prepare(resolve(Ask(method=method), model=foreign), "where?", ["by the weir"])
    with opened(primer=OWN), refused(KnowledgeBaseError, "'own'", "'trained'"):
        opened(new=False, primer=str(trained))


@pytest.mark.parametrize("vectors", [False, True], ids=["text", "vectors"])
def test_damaged_kv_is_made_again_behind_it(opened, trained, vectors):
    with opened(primer=str(trained) if vectors else OWN, stored="native") as kb:
        kb.add([Document(id="a", text=TEXT)])
        before = {key: kb.store.get(key) for key in keys_of(kb)}
        kb.store.delete([key for key, it in keys_of(kb).items() if it.encoder == "primed"])
        report = kb.verify(repair=True)
        assert report.whole and report.repaired == len(kb.chunks_of("a"))
        for key, kv in before.items():
            np.testing.assert_allclose(kb.store.get(key), kv, atol=1e-5)


def test_a_lost_primer_is_said_and_a_shipped_one_mended(opened, tmp_path):
    with opened(chunk_tokens=20, template="plain"):
        pass
    path = tmp_path / "kb" / "catalog.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("UPDATE settings SET value = '\"lost\"' WHERE name = 'primer'")
    assert mend_settings(tmp_path / "kb") == ("primer",)
    with opened(new=False) as kb:
        assert kb.primer.name == "bakery"
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM settings WHERE name = 'primer'")
    with pytest.raises(DamagedCatalogError, match="primer"):
        opened(new=False)


def test_new_vector_stores_have_that_of_the_served_base(opened):
    with opened(primer=OWN) as kb:
        assert recipe_like(kb).primer == OWN


def test_pasted_passages_are_brought_where_the_primer_is_theirs(opened, text_model):
    cut = {"chunk_by": "langchain:500:50", "chunk_tokens": None}
    with opened(primer=OWN, **cut) as kb:
        kb.add([Document(id="a", text="\n\n".join([TEXT] * 3))])
        tokenizer = text_model.text_tokenizer()
        blocks = [hit.ids for hit in kb.chunks_of("a")]
        prefix, primer = tokenizer.leading_ids, OWN.tokens(kb.template, tokenizer)
        held = dict(kb.blocks_held(text_model, "primed", prefix, blocks, primer))
        alone = ChunkEncoding(text_model, kb.store, prefix, apart=True, primer=primer)
        same = np.array_equal(prefix, kb.template.prefix_ids(tokenizer))
        assert sorted(held) == (list(range(len(blocks))) if same else [])
        assert not dict(kb.blocks_held(text_model, "primed", prefix, blocks, primer[1:]))
        assert alone.key("primed", blocks[0]) != dataclasses.replace(alone, primer=primer[1:]).key(
            "primed", blocks[0]
        )


def test_the_connector_finds_primed_chunks(opened, text_model, tmp_path):
    with opened(primer=OWN) as kb:
        kb.add([Document(id="a", text=TEXT)])
        report = write_connector(kb, tmp_path / "out")
        assert report.encoder == "primed" and report.missing == 0
        manifest = read(tmp_path / "out")
        tokenizer = text_model.text_tokenizer()
        chunk = kb.chunks_of("a")[0]
        ids = kb.template.chunk_ids(tokenizer, chunk.ids, chunk.title)
        prompt = np.concatenate((manifest.prefix, ids, ids[:3])).astype(np.int32)
        plan, why = Planner(manifest).plan(prompt, None, 0)
        assert not why and all(key in keys_of(kb) for key, _ in plan.parts)
