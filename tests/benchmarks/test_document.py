"""benchmarks/document.py: new processes prefill nothing of a stored document and train no index."""

import dataclasses

import pytest
from document import KINDS, DocumentOptions, main, report, run
from refusal import refused

from jaxrag.base.errors import RequestError

TINY = (
    "lists:clusters=8,cap=400,knn=50,exact_below=512,min_queries=1,probes=3,queries=200,reach=500"
)


@pytest.mark.slow
def test_counts_prove_it(tmp_path):
    options = DocumentOptions(
        tokens=1500, attention_index=TINY, layers=1, questions=1, max_new_tokens=3
    )
    result = run(options)
    assert result["chunks"] == 1
    assert result["index"]["chunks"] == 1
    assert 1300 < result["tokens"] <= 1510
    for row in (*result["rows"]["retrieval"], *result["rows"]["retrieval, kv=host"]):
        assert row["counts"]["encoded"] == row["counts"]["recomputed"] == 0
        assert row["counts"]["reused"] >= result["tokens"]
        assert row["indexes"]["trained"] == 0
        assert row["indexes"]["stored"] >= 2 * (result["tokens"] - 128 - 512)  # 2 KV heads
    full = result["rows"]["full prefill"]
    assert all(row["indexes"] == {} and row["counts"]["reused"] == 0 for row in full)
    assert full[0]["flops"] > 10 * result["rows"]["retrieval"][0]["flops"]
    assert [command.split()[1] for command in result["commands"]] == ["ingest", *["ask"] * 4]
    assert not any("/" in command for command in result["commands"])
    lines = list(report(result))
    assert [line[:19].strip() for line in lines[3:-1]] == list(KINDS)

    text = tmp_path / "text.txt"
    text.write_text("word " * 100)
    with refused(RequestError):
        run(dataclasses.replace(options, text=str(text)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 0}, "tokens=0"),
        ({"questions": 0}, "questions=0"),
        ({"chunk_tokens": 99_999}, "chunk_tokens=99999"),
        ({"kinds": ("sparse",)}, "kinds=['sparse']"),
        ({"max_new_tokens": 1}, "max_new_tokens=1"),
        ({"tokens": 4000}, ""),
        ({"text": "nowhere.txt"}, "--text nowhere"),
    ],
)
def test_refused(change, message):
    with refused(RequestError, message):
        DocumentOptions(**change)


def test_the_command(capsys):
    assert main(["--tokens", "100"]) != 0
    assert "makes no index of so few" in capsys.readouterr().err


@pytest.mark.slow
def test_every_chunk_is_asked():
    options = DocumentOptions(
        tokens=1900,
        chunk_tokens=600,
        kinds=("retrieval, kv=host",),
        attention_index=TINY,
        layers=1,
        questions=1,
        max_new_tokens=3,
    )
    result = run(options)
    assert result["chunks"] > 2
    for row in result["rows"]["retrieval, kv=host"]:
        assert row["counts"]["reused"] >= result["tokens"]
