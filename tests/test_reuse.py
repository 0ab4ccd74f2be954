"""The account of a result: what of every part was reused, how, and why not."""

import dataclasses
import json

import numpy as np
import pytest

from jaxrag import KnowledgeBase, generate
from jaxrag.cli import main
from jaxrag.documents import Document
from jaxrag.encode import chunk_key
from jaxrag.methods import METHODS
from jaxrag.reuse import PartReuse, token_counts

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
        text_model.forget_cache()
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
    kb.model.forget_cache()
    key = sorted(keys(kb))[0]
    (shard,) = [path for path in (tmp_path / "kb").rglob("*") if _holds(path, key)]
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
    assert main(arguments) == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("reuse: ")]
    assert "chunk hit: chunk " in line and "; it was there once" in line
    assert main([*arguments, "--method", "full_attention"]) == 1
    assert "no chunk is missed" in capsys.readouterr().err
