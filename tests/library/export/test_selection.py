"""Exports of a knowledge base: which chunks, with which token ids, from which documents."""

import functools
import itertools
import json

import numpy as np
import pytest
from refusal import refused
from safetensors import safe_open
from safetensors.numpy import load_file

import jaxrag
from jaxrag.base.errors import KnowledgeBaseError, RequestError
from jaxrag.cli import export
from jaxrag.library.export import FORMATS, MANIFEST
from jaxrag.models.rope import place, rope_table

TEXTS = {
    "salt": "The salt wells of Yanjing are worked by hand. The brine is dried on terraces.",
    "bridge": "A bamboo bridge crosses the river at the wells.",
    "tea": "Tea bricks were traded for salt on the old road.",
}
QUESTION = "Who works the salt wells?"


@pytest.fixture(scope="module")
def kb(tmp_path_factory, text_model):
    """Three documents of one to three chunks and a copy, encoded alone and after the prefix."""
    path = tmp_path_factory.mktemp("export") / "kb"
    encoders = ("isolated", "after_prefix")
    options = {"template": "block_attention", "chunk_tokens": 32, "encoders": encoders}
    with jaxrag.KnowledgeBase.open(path, model=text_model, **options) as kb:
        documents = [
            {"id": name, "text": text, "title": "", "year": year}
            for year, (name, text) in enumerate(TEXTS.items(), 2000)
        ]
        kb.add([*documents, {"id": "copy", "text": TEXTS["bridge"], "title": ""}])
        yield kb


@pytest.fixture
def program(jaxrag):
    return functools.partial(jaxrag, "kb", "export")


def manifest_of(folder):
    return json.loads((folder / MANIFEST).read_text())


def ids_of(kb, document_id):
    """Token ids of a document's chunks as they stand in a prompt."""
    tokenizer = kb.model.tokenizer
    chunks = kb._catalog.chunks(document_id)
    return [kb.template.chunk_ids(tokenizer, chunk.ids, "").tolist() for chunk in chunks]


def test_every_chunk_is_one_file_with_its_token_ids(kb, tmp_path):
    report = kb.export(tmp_path / "out")
    manifest = manifest_of(tmp_path / "out")
    documents = {document["id"]: document for document in manifest["documents"]}
    assert documents.keys() == {*TEXTS, "copy"}
    keys = [chunk["key"] for document in manifest["documents"] for chunk in document["chunks"]]
    assert report.files == len(set(keys)) < len(keys)  # the copy shares its files
    files = {file["chunks"][0]["key"]: file for file in manifest["files"]}
    for name in TEXTS:
        chunks = documents[name]["chunks"]
        assert [files[chunk["key"]]["token_ids"] for chunk in chunks] == ids_of(kb, name)
        for chunk in chunks:
            assert TEXTS[name][chunk["start"] : chunk["end"]].strip()
            assert files[chunk["key"]]["chunks"][0]["encoder"] == "isolated"
    assert documents["salt"]["metadata"]["year"] == 2000


def test_chosen_documents_encoder_and_keys(kb, tmp_path):
    kb.export(tmp_path / "a", documents=["tea"], encoder="after_prefix")
    (document,) = manifest_of(tmp_path / "a")["documents"]
    assert document["id"] == "tea"
    keys = [chunk["key"] for chunk in document["chunks"]]
    assert keys == kb._catalog.keys("tea")["after_prefix"]

    kb.export(tmp_path / "b", keys=keys)
    named, whole = manifest_of(tmp_path / "b"), manifest_of(tmp_path / "a")
    assert named["files"] == whole["files"]
    assert named["documents"] == whole["documents"]

    kb.export(tmp_path / "c", where={"year": {"$gte": 2001}})
    assert {d["id"] for d in manifest_of(tmp_path / "c")["documents"]} == {"bridge", "tea"}


def test_a_key_that_no_document_has_comes_without_token_ids(kb, tmp_path):
    of_documents = set()
    for document in kb.documents():
        of_documents |= {key for keys in kb._catalog.keys(document.id).values() for key in keys}
    (prefix,) = set(kb.store.keys()) - of_documents  # of the template's prefix
    kb.export(tmp_path / "out", keys=[prefix])
    manifest = manifest_of(tmp_path / "out")
    assert manifest["documents"] == []
    (file,) = manifest["files"]
    assert file["token_ids"] is None
    assert file["tokens"] == len(kb.template.prefix_ids(kb.model.tokenizer))


def test_the_prompt_of_a_question_is_one_rotated_cache(kb, tmp_path):
    hits = kb.search(QUESTION, 2)
    kb.export(tmp_path / "out", question=QUESTION, k=2)
    (file,) = manifest_of(tmp_path / "out")["files"]
    tokenizer, template = kb.model.tokenizer, kb.template
    prefix = template.prefix_ids(tokenizer)
    # best_last: the best hit stands right before the question
    parts = [prefix, *(template.chunk_ids(tokenizer, hit.ids, "") for hit in reversed(hits))]
    ids = np.concatenate(parts)
    assert file["token_ids"] == ids.tolist()
    assert file["question"] == QUESTION
    assert file["final_ids"] == template.final_ids(tokenizer, QUESTION).tolist()

    keys = [chunk["key"] for chunk in file["chunks"]]
    kv = np.concatenate([kb.store.get(key) for key in keys], axis=2)
    table = rope_table(kb.config.rope, len(ids))
    tensors = load_file(tmp_path / "out" / file["path"])
    for layer in range(kb.config.num_layers):
        wanted = np.asarray(place(kv[layer, 0], np.arange(len(ids)), table, kb.config.rope))
        found = tensors[f"layers.{layer}.key"][0].swapaxes(0, 1)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
        value = tensors[f"layers.{layer}.value"][0].swapaxes(0, 1)
        np.testing.assert_array_equal(value, kv[layer, 1])


def test_joined_documents_stand_behind_the_prefix(kb, tmp_path):
    kb.export(tmp_path / "out", documents=["tea", "bridge"], joined=True)
    (file,) = manifest_of(tmp_path / "out")["files"]
    prefix = kb.template.prefix_ids(kb.model.tokenizer).tolist()
    wanted = list(itertools.chain(prefix, *ids_of(kb, "tea"), *ids_of(kb, "bridge")))
    assert file["token_ids"] == wanted
    with safe_open(tmp_path / "out" / file["path"], "np") as opened:
        record = json.loads(opened.metadata()["jaxrag"])
    assert record["rope"]["first_position"] == 0
    assert record["token_ids"] == wanted


def test_lmcache_is_rotated_from_0_unless_told_otherwise(kb, tmp_path):
    kb.export(tmp_path / "a", documents=["tea"], format="lmcache")
    assert manifest_of(tmp_path / "a")["rope"]["first_position"] == 0
    kb.export(tmp_path / "b", documents=["tea"], format="lmcache", first_position=9)
    assert manifest_of(tmp_path / "b")["rope"]["first_position"] == 9


def test_what_cannot_be_exported_is_refused(kb, tmp_path):
    for error, named, options in (
        (KnowledgeBaseError, "'nobody'", {"documents": ["salt", "nobody"]}),
        (KnowledgeBaseError, "'neighbours'", {"encoder": "neighbours"}),
        (RequestError, "question", {"documents": ["tea"], "question": QUESTION}),
        (RequestError, "'pickle'", {"format": "pickle"}),
        (RequestError, "zarr", {"format": "zarr", "joined": True}),
        (RequestError, "where", {"documents": ["tea"], "where": {"year": 2000}}),
    ):
        with refused(error, named):
            kb.export(tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()


def test_another_tokenizer_is_refused(kb, tmp_path, tokenizer_dir):
    from jaxrag.models.text.tokenizer import Tokenizer

    text = (tokenizer_dir / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text + "\n")
    with refused(KnowledgeBaseError):
        kb.export(tmp_path / "out", tokenizer=Tokenizer.load(tmp_path))


def test_the_program_offers_every_format():
    assert tuple(FORMATS) == export.FORMATS


def test_the_program_exports_without_loading_the_model(kb, program, tmp_path):
    code, out, err = program(kb.path, tmp_path / "out", "--document", "tea", "--rotate", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["files"] == len(kb._catalog.chunks("tea"))
    assert manifest_of(tmp_path / "out")["rope"]["first_position"] == 0
    code, out, _ = program(kb.path, tmp_path / "out", "--document", "tea", "--rotate")
    assert code == 0
    assert f"({report['files']} were there)" in out


def test_the_program_says_what_it_could_not_export(kb, program, tmp_path):
    absent = "ab" * 20
    code, out, _ = program(kb.path, tmp_path / "out", "--key", absent)
    assert code == 3
    assert f"not exported: {absent}" in out
    code, out, err = program(kb.path, tmp_path / "other", "--document", "nobody")
    assert (code, out) == (1, "")
    assert "no document 'nobody'" in err
    assert program(kb.path, tmp_path / "x", "--document", "a", "--key", "b")[0] == 2
