"""The folder by which engines read: whole or refused, reread, free of jax."""

import dataclasses
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from structure import code_lines

from jaxrag.base.config import Llama3Scaling
from jaxrag.base.errors import StoreError
from jaxrag.connectors import manifest
from jaxrag.serve.connector_files import write_manifest

ROOT = Path(__file__).parents[2]
MOST_LINES = 800  # of code, with the angles that moved out of models/rope.py


def test_it_comes_back(stored):
    stored.write(stored.chunks, rope=dataclasses.replace(
        manifest.read(stored.out).engine.rope, scaling=Llama3Scaling(8.0, 1.0, 4.0, 64)
    ))  # fmt: skip
    found = manifest.read(stored.out)
    write_manifest(stored.folder / "again", found)
    again = manifest.read(stored.folder / "again")
    assert again.engine == found.engine
    assert again.gates == found.gates
    np.testing.assert_array_equal(again.prefix, stored.prefix)
    np.testing.assert_array_equal(again.parts, found.parts)


def test_a_flipped_bit_anywhere_is_refused_or_says_the_same(stored):
    whole = manifest.read(stored.out)
    for path in sorted(stored.out.iterdir()):
        good = path.read_bytes()
        for at in range(0, len(good), max(1, len(good) // 150)):
            bad = bytearray(good)
            bad[at] ^= 1
            path.write_bytes(bad)
            try:
                found = manifest.read(stored.out)
            except StoreError as error:
                assert "\n" not in str(error)
            else:
                assert path.suffix == ".json"  # in a space between its words
                assert found.engine == whole.engine
                assert found.gates == whole.gates
                assert found.prefix.tolist() == whole.prefix.tolist()
        path.write_bytes(good)


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"program": "x", "version": 1}'])
def test_other_files_are_refused(stored, text):
    (stored.out / "connector.json").write_text(text)
    with pytest.raises(StoreError):
        manifest.read(stored.out)


def test_it_is_read_again(stored, monkeypatch, caplog):
    now = [0.0]
    monkeypatch.setattr(manifest.time, "monotonic", lambda: now[0])
    watched = manifest.Watched(stored.out)
    first = watched.current()
    stored.write(stored.chunks[:2])
    assert watched.current() is first  # looked at once a second
    now[0] += 1.5
    second = watched.current()
    assert len(second.parts) == 2
    assert len(list(stored.out.glob("parts-*.bin"))) == 1
    (stored.out / "connector.json").write_text("{")
    now[0] += 1.5
    assert watched.current() is None
    stored.write(stored.chunks, fingerprint="cd" * 32)
    now[0] += 1.5
    assert watched.current() is None
    assert "another model" in caplog.text
    stored.write(stored.chunks)
    now[0] += 1.5
    assert len(watched.current().parts) == len(stored.chunks)


def test_weights_are_hashed_once(tmp_path, monkeypatch):
    (tmp_path / "a.safetensors").write_bytes(b"one")
    memo = tmp_path / "memo.json"
    first = manifest.weights_of(tmp_path, memo)
    monkeypatch.setattr(manifest, "blake3", None)
    assert manifest.weights_of(tmp_path, memo) == first
    monkeypatch.undo()
    (tmp_path / "a.safetensors").write_bytes(b"others")
    assert manifest.weights_of(tmp_path, memo) != first


def test_only_what_is_installed_beside_an_engine_is_imported():
    """All but the file that imports vLLM, with the libraries that docs/engines.md names."""
    program = """
import importlib, json, sys
allowed = set(json.loads(sys.argv[1])) | set(sys.stdlib_module_names) | {"jaxrag"}
class Guard:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in allowed:
            raise ImportError(f"{name} is not installed beside an engine")
sys.meta_path.insert(0, Guard())
for name in ("fetch", "manifest", "plan", "settings", "rotation", "prompt_log"):
    importlib.import_module(f"jaxrag.connectors.{name}")
print(json.dumps([it.__file__ for name, it in sys.modules.items() if name.startswith("jaxrag")]))
"""
    project = tomllib.loads((ROOT / "connectors" / "pyproject.toml").read_text())
    names = [it.partition(">")[0] for it in project["project"]["dependencies"]]
    roots = [name.replace("-", "_") for name in names]
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    files = [(ROOT / "connectors" / name).resolve(strict=True) for name in wheel]
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(roots)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    loaded = map(Path, json.loads(done.stdout))
    assert [it for it in loaded if not any(it.is_relative_to(file) for file in files)] == []


def test_it_stays_small():
    paths = [*(ROOT / "jaxrag" / "connectors").glob("*.py"), ROOT / "jaxrag" / "base" / "rotary.py"]
    assert sum(code_lines(path.read_text()) for path in paths) <= MOST_LINES
