"""Files that come with the package: links in a checkout, copies in a wheel, found by name."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import urllib.request
import venv
import zipfile
from pathlib import Path

import pytest
from refusal import refused

from jaxrag.base.errors import ConfigError, RequestError
from jaxrag.base.installed import DATA, config_names, config_path, located
from jaxrag.cli.serve import _read
from jaxrag.models.text.prompts import template_named
from jaxrag.reuse.methods import method_named
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
    assert _read("valley") == _read("configs/serve/valley.toml")
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
    with refused(ConfigError, "'shrt'"):
        template_named("shrt")
    with refused(RequestError, "'fusion'"):
        method_named("fusion")
    with refused(ConfigError, "--config vally"):
        _read("vally")
    with refused(ConfigError):
        load_config("nothing")
    assert config_names("nothing") == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel, built from what git tracks or would track and a container's builder is given."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    given = {line[1:] for line in ignored if line.startswith("!")}
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in filter(None, listing.split("\0")):
        if name.split("/")[0] in given and os.path.lexists(ROOT / name):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
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
    assert {"jaxrag/py.typed", "jaxrag/server/http/page.html"} <= held.keys()
    tops = {name.split("/")[0] for name in held}
    assert tops == {"jaxrag", "pallas_kernels", "jaxrag-0.2.0.dist-info"}
    assert wheel.stat().st_size < 12_000_000
    assert "Requires-Python: >=3.12" in metadata


@pytest.fixture(scope="module")
def new_user(wheel, tmp_path_factory):
    """Runs a command in an empty folder, with the wheel and this environment's other packages."""
    made = tmp_path_factory.mktemp("made")
    venv.create(made, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(made)}))
    # A path file of a path file is not read: of a package that is installed there as a link to a
    # checkout, nothing is seen.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", made / "bin" / "python", "install", "--no-deps",
         "--no-index", "--quiet", "--disable-pip-version-check", wheel],
        check=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("empty")
    environment = {**os.environ, "PATH": f"{made / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)

    def run(*words, start=subprocess.run, **options):
        return start(words, cwd=folder, env=environment, text=True, **options)

    return run, folder


def said(done):
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_new_user_gets_from_the_wheel_to_a_server(new_user):
    """Install, demo, ingest a folder, ask, change a file, ask again, measure, serve."""
    run, folder = new_user
    where = run("python", "-c", "import jaxrag; print(jaxrag.__file__)", capture_output=True)
    assert str(ROOT) not in said(where)
    assert "8 of 8" in said(run("jaxrag", "demo", capture_output=True))
    asked = ("jaxrag", "ask", "What is the home of Giso Berow?", "--k", "6", "--json")
    told = json.loads(said(run(*asked, "--kb", "jaxrag-demo/kb-dual", capture_output=True)))
    assert told["text"] == "Kerdorf"

    said(run("jaxrag", "demo", "--unpack", ".", capture_output=True))
    ingest = (
        "jaxrag", "ingest", "examples/village", "--kb", "kb", "--chunk-by", "sentence",
        "--chunk-tokens", "20", "--overlap", "0", "--model", "checkpoints/synthetic-0.8m/dual",
        "--encoder", "isolated", "--encoder", "after_prefix",
    )  # fmt: skip
    assert "13 documents (0 unchanged" in said(run(*ingest, capture_output=True))
    told = json.loads(said(run(*asked, "--kb", "kb", capture_output=True)))
    assert (told["text"], told["counts"]["encoded"]) == ("Kerdorf", 0)

    changed = folder / "examples/village/giso-berow.md"
    changed.write_text(changed.read_text().replace("Kerdorf", "Tondorf"))
    again = run("jaxrag", "ingest", "examples/village", "--kb", "kb", capture_output=True)
    assert "13 documents (12 unchanged, 1 replaced)" in said(again)
    told = json.loads(said(run(*asked, "--kb", "kb", capture_output=True)))
    assert told["text"] == "Tondorf"

    measured = run(
        "jaxrag", "eval", "own", "--kb", "kb", "--questions", "examples/village-questions.jsonl",
        "--k", "6", "--methods", "turborag", "--max-new-tokens", "8", capture_output=True,
    )  # fmt: skip
    assert re.search(r"turborag\s+87\.5", said(measured)), measured.stdout  # one answer changed

    served = run(
        "jaxrag", "serve", "--kb", "kb", "--port", "0", "--no-warm-up",
        start=subprocess.Popen, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        banner = served.stdout.readline()  # said when it takes requests
        body = {"messages": [{"role": "user", "content": "Who is the teacher of Jodo Dudin?"}]}
        request = urllib.request.Request(
            f"{re.search(r'http://[^ ]*:[0-9]+', banner)[0]}/v1/chat/completions",
            json.dumps(body | {"k": 6}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            answered = json.load(answer)
        assert answered["choices"][0]["message"]["content"].strip() == "Radia Dalell"
    finally:
        served.terminate()
        served.communicate(timeout=60)
    assert served.returncode == 0
