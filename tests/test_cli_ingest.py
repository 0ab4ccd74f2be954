"""`jaxrag ingest` and the scripts of clusters: options, reports, what is refused before work."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrag.cli import main
from jaxrag.cli.ingest import merged
from jaxrag.library.documents import BadDocument
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.library.knowledge_base.reports import AddReport

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
        assert kb.search("盐井", k=1)[0].document_id == "a.csv/a"
        assert kb.search("更多", k=1)[0].section == "Two"


def test_chunks_are_encoded_behind_their_neighbours(ingest, tmp_path, capsys, model_dir):
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text(f"The salt well number {number} of Yanjing.")
    paths = [tmp_path / f"{number}.txt" for number in range(5)]
    options = ["--encoder", "neighbours", "--neighbours", "2", "--similar-by", "bm25"]
    code, report, _ = ingest(*paths[:4], options=options)
    assert (code, report["encoded"]) == (0, 0)
    assert (report["neighbours"]["chunks"], report["neighbours"]["encoded"]) == (4, 4)
    kb = ["--kb", str(tmp_path / "kb")]
    assert main(["ingest", str(paths[4]), *kb, "--model", str(model_dir)]) == 0  # remembered
    shown, told = capsys.readouterr()
    assert "behind their neighbours: searched those of " in shown
    assert "neighbours: 4 of 5 chunks may have others now, and are encoded again if so" in told
    assert main(["ask", "Which salt well?", *kb, "--method", "fusionrag", "--k", "3",
                 "--max-new-tokens", "2", "--recompute-ratio", "0.2", "--json"]) == 0  # fmt: skip
    answer = json.loads(capsys.readouterr().out)
    assert answer["counts"]["encoded"] == 0
    assert answer["counts"]["recomputed"] > 0
    code, _, err = ingest(paths[0], options=["--neighbours", "3"])
    assert (code, err.count("\n")) == (1, 1)
    assert "neighbours=3 without an encoder" in err or "has neighbours=2, not 3" in err


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


def test_words_that_the_model_cannot_read_are_a_warning(word_model_dir, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("File 23: Kora Felell lives in Baldorf.")
    command = ["ingest", str(tmp_path / "a.txt"), "--kb", str(tmp_path / "kb")]
    command += ["--model", str(word_model_dir), "--chunk-tokens", "64"]
    assert main(command) == 0
    size = "about 616B of KV: 11 tokens of 0.1 KiB as int8"
    assert capsys.readouterr().err.startswith(size)
    (tmp_path / "a.txt").write_text("Kora Felell lives in Hamburg, a town of Hamburg; a b c d e.")
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert "1 document (0 unchanged, 1 replaced)" in out
    assert err.endswith(
        "\nwarning: the model's vocabulary lacks 9 of 19 tokens, such as 'Hamburg', ',', 'town', "
        "';', 'b'; it reads them all as one unknown word\n"
    )
    assert main(command) == 0
    assert re.search(r"(?m)encoded 0 chunks, reused 1; [\d.]+ s$", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--shard", "2/2"], "shard '2/2'"),
        (["--shard", "half"], "shard 'half': expected i/n"),
        (["--encoding", "klingon"], "encoding 'klingon' is unknown"),
        (["--chunk-by", "page"], "chunk by 'page': expected one of tokens, sentence, markdown"),
        (["--overlap", "64"], "overlap=64"),
        (["--index", "exact"], "without an embedder"),
        (["--embedder", "nowhere"], "nowhere"),
        (["--encoder", "isolate"], "encoder 'isolate': expected one of isolated, after_prefix"),
        (["--template", "nonsense"], "template 'nonsense'"),
        (["--chunk-tokens", "0"], "chunk_tokens"),
        (["--chunk-tokens", "2000"], "the model has 1024"),
        (["--mesh", "a,b,c"], "--mesh 'a,b,c'"),
        (["--model", "nowhere", "gone.txt"], "gone.txt: no such file or folder"),
    ],
)
def test_bad_option_is_refused_before_anything_is_made(ingest, tmp_path, options, words):
    (tmp_path / "a.txt").write_text("text")
    code, report, err = ingest(tmp_path / "a.txt", options=options)
    assert (code, report) == (1, None)
    assert words in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "kb").exists()


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


def test_script_has_an_example():
    done = subprocess.run(
        [sys.executable, SCRIPTS / "ingest.py", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "example: " in done.stdout


def test_reports_of_parts_are_added_up():
    bad = BadDocument("a", "why")
    parts = [
        AddReport(1, 0, 1, 5, 50, 4, 1, 40, (bad,), 3.0, 4, ("a", "b", "c")),
        AddReport(2, 1, 0, 3, 30, 3, 0, 30, (), 9.0, 5, ("b", "d", "e", "f")),
    ]
    whole = AddReport(3, 1, 1, 8, 80, 7, 1, 70, (bad,), 10.0, 9, ("a", "b", "c", "d", "e"))
    assert merged(parts, 10.0) == whole


def test_documents_are_added_without_kv(ingest, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("The salt wells of Yanjing.")
    code, report, _ = ingest(tmp_path / "a.txt", options=["--encode", "on-demand"])
    assert (code, report["encoded"], report["on_demand"]) == (0, 0, 1)
    options = ["--kb", str(tmp_path / "kb"), "--encode", "on-demand"]
    assert main(["ingest", str(tmp_path / "a.txt"), *options]) == 0
    assert "encoded when they are needed first: 1 chunk\n" in capsys.readouterr().out
    assert main(["kb", "verify", str(tmp_path / "kb")]) == 0
    assert "1 not stored, under the size limit or until" in capsys.readouterr().out
    assert main(["kb", "stats", str(tmp_path / "kb"), "--walk", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stored"]["missing"] == 1
    with pytest.raises(SystemExit):
        main(["ingest", str(tmp_path / "a.txt"), *options[:2], "--encode", "later"])
    assert "'later' is not one of 'now', 'on-demand'" in capsys.readouterr().err


def test_bytes_are_said_before_anything_is_written_and_after(ingest, tmp_path, capsys, model_dir):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"The salt well number {number} of Yanjing.")
    paths = [tmp_path / f"{number}.txt" for number in range(3)]
    code, plan, _ = ingest(*paths, options=["--dry-run"])
    assert (code, plan["encoded"], (tmp_path / "kb").exists()) == (0, 3, False)
    assert plan["room"] > plan["kv_bytes"] > 0
    code, report, _ = ingest(*paths, options=["--encoder", "after_prefix"])
    assert (code, report["kv_bytes"]) == (0, plan["kv_bytes"])
    with KnowledgeBase.open(tmp_path / "kb") as kb:
        stored = kb.stats()["stored"]
    each = stored["bytes_per_token"]
    assert plan["kv_bytes"] == plan["kv_tokens"] * each
    assert stored["bytes"] == stored["tokens"] * each  # the template's prefix among them
    paths[1].write_text("Another well.")
    call = ["ingest", *map(str, paths), "--kb", str(tmp_path / "kb")]
    assert main([*call, "--dry-run"]) == 0
    out = capsys.readouterr().out
    [size] = re.findall(r"would write about (.*) of KV: \d+ tokens of [\d.]+ KiB", out)
    assert main(call) == 0
    out, err = capsys.readouterr()
    assert err.startswith(f"about {size} of KV: ")
    assert f"encoded 1 chunk ({size}), reused 2; " in out
    assert main(call) == 0
    assert " of KV" not in capsys.readouterr().err


def test_what_the_disk_does_not_hold_is_refused_before_work(ingest, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("The salt wells of Yanjing. " * 20)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=30_000))
    code, _, err = ingest(tmp_path / "a.txt", options=["--stored", "native"])
    assert (code, err.count("\n"), (tmp_path / "kb").exists()) == (1, 1, False)
    assert re.search(r"the disk has 30kB free; free some, or .*--stored int4 \(", err)
    assert ingest(tmp_path / "a.txt", options=["--max-bytes", "25kB"])[0] == 0
    (tmp_path / "b.txt").write_text("Another well.")
    assert ingest(tmp_path / "b.txt")[0] == 0  # as it remembers its limit
