"""Files that come with the package: links in a checkout, copies in a wheel, found by name."""

import io
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from jaxrag.cli.serve import _read
from jaxrag.errors import ConfigError, RequestError
from jaxrag.installed import DATA, config_names, config_path, located
from jaxrag.methods import method_named
from jaxrag.text.prompts import template_named
from jaxrag.train.config import load_config
from jaxrag.train.start import model_config

ROOT = Path(__file__).parents[1]
SHIPPED = [path for path in sorted(DATA.rglob("*")) if path.is_symlink()]


def test_a_checkout_holds_each_file_once():
    """Below jaxrag/data are links only, and each leads to what has its place at the top level."""
    assert not [path for path in DATA.rglob("*") if path.is_file() and not path.is_symlink()]
    for link in SHIPPED:
        assert link.resolve() == ROOT / link.relative_to(DATA), link
    assert {link.relative_to(DATA).parts[0] for link in SHIPPED} == {
        "checkpoints", "configs", "examples"
    }  # fmt: skip


def test_names_of_installed_files_in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert template_named("short") == template_named("configs/templates/short.toml")
    assert method_named("fusionrag_final").template == "turborag"
    assert method_named("configs/methods/fusionrag_final.toml").name == "fusionrag_final"
    assert _read("village") == _read("configs/serve/village.toml")
    train = load_config("turborag-qwen2-7b")
    assert train == load_config("configs/train/turborag-qwen2-7b.toml")
    assert model_config(train, planned=True).num_layers == 28


def test_the_working_folder_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mine = Path("configs/templates/short.toml")
    mine.parent.mkdir(parents=True)
    mine.write_text('prefix = ""\nchunk = "{text}"\nfinal = "{question}"\n', encoding="utf-8")
    assert template_named(str(mine)).final == "{question}"
    assert template_named("short").final != "{question}"  # the name is that of the installed one


def test_what_is_nowhere_is_named_as_it_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert located("configs/none.toml") == Path("configs/none.toml")
    assert located("../configs/templates/short.toml") == Path("../configs/templates/short.toml")
    assert config_path("../../etc/x", "templates") is None
    with pytest.raises(ConfigError, match=r"template 'shrt': .*instructed, short or the path"):
        template_named("shrt")
    with pytest.raises(RequestError, match=r"method 'fusion': .*fusionrag_final"):
        method_named("fusion")
    with pytest.raises(ConfigError, match=r"--config vilage: .* one of village"):
        _read("vilage")
    with pytest.raises(ConfigError, match=r"nothing: expected the path .* shipped, "):
        load_config("nothing")
    assert config_names("nothing") == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel, built from what git tracks or would track."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in filter(None, listing.split("\0")):
            if not name.startswith(("tests/", "benchmarks/")) and os.path.lexists(ROOT / name):
                archive.add(ROOT / name, name)
    packed.seek(0)
    with tarfile.open(fileobj=packed) as archive:
        archive.extractall(tree, filter="tar")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet",
         "--no-index", "--disable-pip-version-check", "--wheel-dir", out, tree],
        capture_output=True,
        text=True,
        check=True,
    )  # fmt: skip
    (built,) = out.glob("*.whl")
    return built


def test_a_wheel_holds_what_it_needs(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = {name: archive.getinfo(name).file_size for name in archive.namelist()}
        metadata = archive.read(next(name for name in held if name.endswith("/METADATA"))).decode()
    for link in SHIPPED:
        there = link.resolve()
        files = [there] if there.is_file() else [p for p in there.rglob("*") if p.is_file()]
        assert files
        for file in files:
            name = link.relative_to(ROOT) / file.relative_to(there)
            assert held[str(name)] == file.stat().st_size
    code = {str(path.relative_to(ROOT)) for path in (ROOT / "jaxrag").rglob("*.py")}
    code |= {str(path.relative_to(ROOT)) for path in (ROOT / "pallas_kernels").rglob("*.py")}
    assert code <= held.keys()
    assert {"jaxrag/py.typed", "jaxrag/server/page.html"} <= held.keys()
    tops = {name.split("/")[0] for name in held}
    assert tops == {"jaxrag", "pallas_kernels", "jaxrag-0.1.0.dist-info"}
    assert wheel.stat().st_size < 10_000_000
    assert "Requires-Python: >=3.12" in metadata
