"""The account of a result: what of every part was reused, how, and why not."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from jaxrag import KnowledgeBase, generate
from jaxrag.cli import main
from jaxrag.engine.engine import engine_of
from jaxrag.engine.reuse import PartReuse, token_counts
from jaxrag.library.documents import Document
from jaxrag.reuse.encode import chunk_key
from jaxrag.reuse.methods import METHODS

TEXTS = {
    "salt": "The salt wells of Yanjing are worked by hand.",
    "bridge": "A bamboo bridge crosses the river at the salt wells.",
    "tea": "Tea bricks were traded for salt and for wool.",
}
QUESTION = "Who works the salt wells?"
IN_PLACE = dataclasses.replace(METHODS["turborag"], misses="in_place")


@pytest.fixture
def kb(tmp_path, text_model):
    """A knowledge base of its own tenant: nothing of it lies in the pool before the test."""
    settings = {"template": "plain", "chunk_tokens": 64, "salt": str(tmp_path)}
    with KnowledgeBase.open(tmp_path / "kb", text_model, **settings) as opened:
        opened.add([Document(name, text) for name, text in TEXTS.items()])
        engine_of(text_model).forget()
        yield opened


def keys(kb):
    """Of the chunks: everything that is stored but the prefix."""
    prefix = kb.template.prefix_ids(kb.model.tokenizer)
    of_prefix = chunk_key(kb.store.fingerprint, kb.model, "isolated", prefix[:0], prefix)
    return {record.key for record in kb.store.records()} - {of_prefix}


def _holds(path, key):
    """Does this file hold the bytes of a chunk?"""
    return key in path.parts and "c" in path.parts and path.is_file()


def of_chunks(result):
    return [row for row in result.reuse if row.part != "prefix"]


def test_found_in_the_store_and_then_in_the_pool(kb):
    for where in ("store", "pool"):
        rows = of_chunks(generate(QUESTION, kb=kb, max_new_tokens=1))
        assert [row.part for row in rows] == ["chunk 0", "chunk 1", "chunk 2"]
        assert {row.where for row in rows} == {where}
        assert {row.why for row in rows} == {""}


def test_forgetting_keeps_the_arrays_of_the_pool_and_nothing_in_them(kb):
    runner = engine_of(kb.model).runner
    before = generate(QUESTION, kb=kb, max_new_tokens=4)
    cache = runner.cache
    engine_of(kb.model).forget()
    assert runner.cache is cache
    assert not cache.allocator.chunks
    assert cache.allocator.num_free == cache.allocator.num_pages
    again = generate(QUESTION, kb=kb, max_new_tokens=4)
    assert {row.where for row in of_chunks(again)} == {"store"}
    assert again.token_ids == before.token_ids


def test_the_prefix_and_a_first_chunk_behind_it_are_a_prefix_hit(kb):
    options = {"kb": kb, "template": "turborag", "max_new_tokens": 1}
    generate(QUESTION, method="full_reuse", **options)
    rows = generate(QUESTION, method="full_reuse", **options).reuse
    assert [row.how for row in rows] == ["prefix hit", "prefix hit", "chunk hit", "chunk hit"]
    assert rows[0].part == "prefix" and rows[0].tokens > 0
    rows = generate(QUESTION, method="full_attention", **options).reuse
    assert {(row.how, row.where, row.why) for row in rows} == {
        ("computed", None, "full_attention reuses no chunk")
    }


def test_an_evicted_chunk_is_told_from_one_that_was_never_encoded(kb):
    assert kb.store.delete(keys(kb)) == 3
    rows = of_chunks(generate(QUESTION, kb=kb, method=IN_PLACE, max_new_tokens=1))
    assert {row.how for row in rows} == {"in place"}
    assert all(row.why.endswith("; it was there once: evicted or removed") for row in rows)
    rows = of_chunks(generate(QUESTION, kb=kb, method="full_reuse", max_new_tokens=1))
    assert {row.how for row in rows} == {"encoded"}
    assert all(
        row.why.endswith("; the knowledge base keeps isolated, not after_prefix") for row in rows
    )


def test_a_chunk_under_another_encoder_is_pointed_out(kb):
    method = dataclasses.replace(METHODS["full_reuse"], misses="in_place")
    rows = of_chunks(generate(QUESTION, kb=kb, method=method, max_new_tokens=1))
    assert all("under after_prefix, but under isolated" in row.why for row in rows)
    given = generate(QUESTION, kb=kb, documents=["wool"], method=method, max_new_tokens=1)
    (row,) = of_chunks(given)
    assert (row.how, row.why) == ("in place", "not in the store")
    assert (
        "computed in place (1 not in the store, 0 corrupt there) and not stored"
        in (given.notes[-1])
    )


def test_a_damaged_chunk_is_a_gap_that_says_so(kb, tmp_path):
    whole = generate(QUESTION, kb=kb, max_new_tokens=4)
    engine_of(kb.model).forget()
    key = sorted(keys(kb))[0]
    files = [path for path in (tmp_path / "kb").rglob("*") if _holds(path, key)]
    shard = max(files, key=lambda path: path.stat().st_size)  # beside it are its scales
    data = bytearray(shard.read_bytes())
    data[100] ^= 255
    shard.write_bytes(data)
    result = generate(QUESTION, kb=kb, method=IN_PLACE, max_new_tokens=4)
    rows = of_chunks(result)
    (bad,) = [row for row in rows if row.how == "in place"]
    assert bad.why.startswith("damaged: ")
    assert result.counts["encoded"] == bad.tokens
    assert sum(result.counts.values()) == sum(whole.counts.values())


def test_recomputed_tokens_are_counted_per_chunk(text_model):
    documents = [text + " " + str(np.pi) for text in TEXTS.values()]
    options = {"documents": documents, "model": text_model, "max_new_tokens": 1}
    generate(QUESTION, method="epic", **options)
    result = generate(QUESTION, method="epic", **options)
    rows = of_chunks(result)
    assert [row.recomputed for row in rows] == [16, 16, 16]
    assert token_counts(result.reuse) == result.counts
    assert result.counts["recomputed"] == 48


def test_counts_add_up_whatever_happened():
    rows = [
        PartReuse("prefix", 100, "prefix hit", "pool", 0, ""),
        PartReuse("chunk 0", 10, "chunk hit", "store", 3, ""),
        PartReuse("chunk 1", 20, "encoded", None, 5, "not in memory"),
        PartReuse("chunk 2", 30, "in place", None, 0, "not in memory"),
        PartReuse("chunk 3", 40, "computed", None, 0, "no reuse"),
    ]
    assert token_counts(rows) == {"reused": 7, "recomputed": 43, "encoded": 50}


def test_ask_shows_the_account(kb, capsys):
    path = str(kb.path)
    deleted = sorted(keys(kb))[0]
    kb.store.delete([deleted])
    kb.close()
    arguments = ["ask", QUESTION, "--kb", path, "--cache-tokens", "4096", "--max-new-tokens", "2"]
    arguments += ["--misses", "in_place"]
    assert main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["reuse"]
    assert [row["part"] for row in rows] == ["prefix", "chunk 0", "chunk 1", "chunk 2"]
    assert sorted(row["how"] for row in rows[1:]) == ["chunk hit", "chunk hit", "in place"]
    assert list(rows[0]) == ["part", "tokens", "how", "where", "recomputed", "why"]
    assert main([*arguments, "--explain"]) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert "chunk hit in the " in told and "; it was there once" in told
    assert main([*arguments, "--method", "full_attention"]) == 1
    assert "no chunk is missed" in capsys.readouterr().err


def test_prompts_that_begin_alike_share_their_leading_parts(text_model):
    method = dataclasses.replace(METHODS["full_attention"], prefix_cache=True)
    documents = [text + " " + str(np.e) for text in TEXTS.values()]
    questions = [QUESTION, "What crosses the river?", "Wool?"]
    options = {"documents": documents, "model": text_model, "max_new_tokens": 5, "batch_size": 1}
    full = generate(questions, method="full_attention", **options)
    kept = generate(questions, method=method, **options)
    assert [result.token_ids for result in kept] == [result.token_ids for result in full]
    served_first = max(kept, key=lambda result: result.flops)
    for result in kept:
        first = result is served_first
        assert {row.how for row in result.reuse} == {"computed" if first else "prefix hit"}
        total = sum(result.counts.values())
        assert result.counts["reused"] == (0 if first else total)
    turned = generate(QUESTION, method=method, **{**options, "documents": documents[::-1]})
    assert [row.how for row in turned.reuse] == ["prefix hit", *["computed"] * 3]


def test_the_example_file_finds_then_fills_then_recomputes(text_model):
    path = Path(__file__).parents[2] / "configs" / "methods" / "fusionrag_in_place.toml"
    documents = [text + " " + str(np.sqrt(2)) for text in TEXTS.values()]
    options = {"documents": documents, "model": text_model, "max_new_tokens": 5}
    full = generate(QUESTION, method="full_attention", **options)
    gaps = generate(QUESTION, method=str(path), **options)
    assert [row.how for row in of_chunks(gaps)] == ["in place"] * 3
    assert gaps.token_ids == full.token_ids
    kept = generate(QUESTION, method=str(path), **options)
    assert [row.how for row in kept.reuse] == ["prefix hit"] * 4
    assert kept.token_ids == full.token_ids
    assert kept.counts["recomputed"] == 0
