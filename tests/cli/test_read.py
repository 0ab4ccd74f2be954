"""`jaxrag read` shows what is read of files, and `jaxrag kb show` what is stored of a document."""

import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from jaxrag.cli import main

BASE = Path(__file__).parents[1] / "formats" / "int8.tar.gz"
PICTURE = "![valve](data:image/png;base64,QUJD)"


def test_text_metadata_and_what_was_left_out(tmp_path, capsys):
    (tmp_path / "pump.md").write_text(f"---\nyear: 2024\n---\n# Pump\n\nOpen {PICTURE} \x1b[2J.\n")
    (tmp_path / "odd.xls").write_text("x")
    assert main(["read", str(tmp_path)]) == 3
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "== pump.md: Pump", "left out: 1 picture inlined as data", 'metadata: {"year": 2024}', "",
        "# Pump", "", "Open valve \\x1b[2J.", "", "",
    ]  # fmt: skip
    assert "odd.xls: file type '.xls'" in err
    assert main(["read", str(tmp_path / "pump.md"), "--json"]) == 0
    (document,) = json.loads(capsys.readouterr().out)["documents"]
    assert document["text"].startswith("# Pump")
    assert document["metadata"]["left_out"][0]["count"] == 1


def test_neither_jax_nor_weights_are_loaded(tmp_path):
    (tmp_path / "a.txt").write_text("Herons nest in May.")
    program = (
        "import sys; from jaxrag.cli import main; main(sys.argv[1:]); "
        "print([it for it in ('jax', 'numpy', 'tokenizers') if it in sys.modules])"
    )
    words = [sys.executable, "-c", program, "read", str(tmp_path / "a.txt")]
    out = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "Herons nest in May." in out
    assert "'jax'" not in out.splitlines()[-1]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    with tarfile.open(BASE) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.rglob("catalog.sqlite")).parent


def test_a_document_as_it_is_stored(base, capsys, tmp_path):
    copy = shutil.copytree(base, tmp_path / "kb")
    assert main(["kb", "list", str(copy), "--json"]) == 0
    name = json.loads(capsys.readouterr().out)["documents"][0]["id"]
    assert main(["kb", "show", str(copy), name, "--chunks", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["id"] == name and len(told["chunks"]) >= 1
    for chunk in told["chunks"]:
        assert chunk["text"] in told["text"]
    assert main(["kb", "show", str(copy), name]) == 0
    assert told["text"].split("\n")[0] in capsys.readouterr().out
    assert main(["kb", "show", str(copy), name, "--chunks"]) == 0
    assert "-- chunk 0, characters 0 to " in capsys.readouterr().out
    assert main(["kb", "show", str(copy), "nothing"]) == 1
    assert "no document 'nothing'" in capsys.readouterr().err
