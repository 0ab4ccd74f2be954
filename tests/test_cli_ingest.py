"""`jaxrag ingest` and the scripts of clusters: options, reports, what is refused before work."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrag.cli import main
from jaxrag.documents import BadDocument
from jaxrag.ingest import AddReport
from jaxrag.knowledge_base import KnowledgeBase

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def ingest(tmp_path, model_dir, capsys):
    """Run the command: exit code, its JSON object (None when it failed), stderr."""

    def call(*paths, options=()):
        made = ["--kb", str(tmp_path / "kb"), "--model", str(model_dir), "--template", "plain"]
        sizes = ["--chunk-tokens", "64", "--json"]
        capsys.readouterr()
        code = main(["ingest", *map(str, paths), *made, *sizes, *options])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out else None, err

    return call


def test_how_files_are_read_and_cut_can_be_said(ingest, tmp_path):
    (tmp_path / "a.csv").write_bytes("id,abstract\na,盐井\n".encode("gb18030"))
    (tmp_path / "b.md").write_bytes("# One\n\ntext\n\n# Two\n\n更多\n".encode("gb18030"))
    options = ["--encoding", "gb18030", "--text-field", "abstract", "--chunk-by", "markdown"]
    code, report, _ = ingest(tmp_path / "a.csv", tmp_path / "b.md", options=options)
    assert (code, report["documents"], report["chunks"]) == (0, 2, 3)
    assert report["chunks_per_second"] > 0
    with KnowledgeBase.open(tmp_path / "kb") as kb:
        assert kb.chunking.by == "markdown"
        assert kb.search("盐井", k=1)[0].document_id == "a"
        assert kb.search("更多", k=1)[0].section == "Two"


def test_report_names_bad_files_whatever_they_are_called(ingest, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "good.txt").write_text("The salt wells.")
    for name in (b"caf\xe9.txt", b"two\nlines.txt", b"bad.pdf"):
        with open(os.path.join(os.fsencode(folder), name), "wb") as file:
            file.write(b"\xff")
    code, report, err = ingest(folder)
    assert (code, report["documents"], len(report["skipped"])) == (3, 1, 3)
    assert len(err.splitlines()) == 3
    assert "caf\\udce9.txt" in err
    assert "two\\nlines.txt" in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--shard", "2/2"], "shard 2/2"),
        (["--shard", "half"], "shard 'half': expected I/N"),
        (["--encoding", "klingon"], "encoding 'klingon' is unknown"),
        (["--chunk-by", "page"], "chunk by 'page': expected one of tokens, sentence, markdown"),
        (["--overlap", "64"], "overlap=64"),
        (["--index", "exact"], "without an embedder"),
        (["--embedder", "nowhere"], "nowhere"),
    ],
)
def test_bad_option_is_refused_before_anything_is_made(ingest, tmp_path, options, words):
    (tmp_path / "a.txt").write_text("text")
    code, report, err = ingest(tmp_path / "a.txt", options=options)
    assert (code, report) == (1, None)
    assert words in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "kb").exists()


def test_missing_path_is_refused_before_the_model_is_loaded(ingest, tmp_path):
    code, _, err = ingest(tmp_path / "gone.txt", options=["--model", "nowhere"])
    assert code == 1
    assert "gone.txt: no such file or folder" in err


@pytest.mark.parametrize(
    ("script", "options", "words"),
    [
        ("ingest.py", ["--process-id", "1"], "need --distributed"),
        ("ingest.py", ["--distributed", "--shard", "0/2"], "pass one of the two"),
        ("ingest.py", ["--distributed"], "jax.distributed cannot start"),
    ],
)
def test_script_refuses(script, options, words, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    command = [tmp_path / "a.txt", "--kb", tmp_path / "kb", "--model", "nowhere", *options]
    done = subprocess.run(
        [sys.executable, SCRIPTS / script, *command], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert words in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("script", ["ingest.py", "ray_ingest.py"])
def test_script_has_an_example(script):
    done = subprocess.run(
        [sys.executable, SCRIPTS / script, "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "example: " in done.stdout


def test_reports_of_parts_are_added_up():
    merged = runpy.run_path(str(SCRIPTS / "ray_ingest.py"))["merged"]
    bad = BadDocument("a", "why")
    parts = [
        AddReport(1, 0, 1, 5, 50, 4, 1, 40, (bad,), 3.0),
        AddReport(2, 1, 0, 3, 30, 3, 0, 30, (), 9.0),
    ]
    assert merged(parts, 10.0) == AddReport(3, 1, 1, 8, 80, 7, 1, 70, (bad,), 10.0)
