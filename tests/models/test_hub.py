"""Models by name: the real huggingface_hub against an endpoint on this machine."""

import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from refusal import refused

from jaxrag.base.errors import ModelError
from jaxrag.models import hub, model
from jaxrag.models.model import load_model

GOLDENS = Path(__file__).parents[1] / "goldens"
COMMITS = {"main": "1" * 40, "v1": "2" * 40}
LOAD = """
import json, sys
from jaxrag.base.errors import JaxragError
from jaxrag.models.model import load_model
for name in sys.argv[1:]:
    try:
        model = load_model(name)
        print(json.dumps([name, model.path, model.digest]))
    except JaxragError as error:
        print(json.dumps([name, None, str(error)]))
"""
FETCH = """
import json, sys
from jaxrag.base.errors import ModelError
from jaxrag.models.hub import fetched
def look(folder):
    if (folder / "refused").exists():
        raise ModelError("too large")
for name in sys.argv[1:]:
    try:
        print(json.dumps([name, str(fetched(name, look)), ""]))
    except ModelError as error:
        print(json.dumps([name, None, str(error)]))
"""


class Endpoint(http.server.ThreadingHTTPServer):
    """Serves one folder as org/tiny, as much of the hub's API as its client asks for."""

    daemon_threads = True

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Answer)
        self.folder, self.asked = folder, []


class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body):
        path = self.path.partition("?")[0]
        folder = self.server.folder
        files = {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file()}
        headers = {}
        match path.strip("/").split("/"):
            case ["api", "models", "org", "tiny", "revision", revision] if revision in COMMITS:
                content = json.dumps({"id": "org/tiny", "sha": COMMITS[revision]}).encode()
            case ["api", "models", "org", "tiny", "revision", _]:
                content, headers = b"{}", {"X-Error-Code": "RevisionNotFound"}
            case ["api", "models", "org", "tiny", "tree", _]:
                content = json.dumps(
                    [
                        {"type": "file", "path": name, "size": p.stat().st_size, "oid": name}
                        for name, p in files.items()
                    ]
                ).encode()
            case ["org", "tiny", "resolve", commit, *name] if "/".join(name) in files:
                self.server.asked.append("/".join(name))
                content = files["/".join(name)].read_bytes()
                headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
                headers["X-Repo-Commit"] = commit
            case _:
                content, headers = b"{}", {"X-Error-Code": "RepoNotFound"}
        self.send_response(404 if "X-Error-Code" in headers else 200)
        for name, value in {**headers, "Content-Length": len(content)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def endpoint(tmp_path):
    folder = tmp_path / "served"
    shutil.copytree(GOLDENS / "llama", folder)
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.safetensors").write_bytes(b"large")
    (folder / "pytorch_model.bin").write_bytes(b"never unpickled")
    with Endpoint(folder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def ask(program, tmp_path, url, *names, **environment):
    """What a new process prints of every name: its folder, or None, and what it says."""
    given = {
        **os.environ,
        "HF_ENDPOINT": url,
        "HF_HOME": str(tmp_path / "hub"),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_OFFLINE": "0",
        **environment,
    }
    done = subprocess.run(
        [sys.executable, "-c", program, *names],
        env=given,
        cwd=tmp_path,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    return {name: (path, said) for name, path, said in map(json.loads, done.stdout.splitlines())}


def test_a_name_is_fetched_once_and_a_revision_by_its_own(endpoint, tmp_path):
    url = "http://{}:{}".format(*endpoint.server_address)
    names = ["org/tiny", "org/tiny@v1", "org/tiny@gone", "org/absent"]
    found = ask(LOAD, tmp_path, url, *names)
    digest = load_model(GOLDENS / "llama").digest
    for name, commit in (("org/tiny", COMMITS["main"]), ("org/tiny@v1", COMMITS["v1"])):
        path, said = found[name]
        assert (Path(path).name, said) == (commit, digest)
    assert found["org/tiny@gone"][0] is found["org/absent"][0] is None
    assert "has no revision 'gone'" in found["org/tiny@gone"][1]
    assert "no such model or does not give it" in found["org/absent"][1]
    read = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    asked = set(endpoint.asked)
    assert {"config.json", "model.safetensors"} <= asked <= read | {"tokenizer_config.json"}

    endpoint.asked.clear()
    again = ask(FETCH, tmp_path, url, "org/tiny", "org/other", HF_HUB_OFFLINE="1")
    assert again["org/tiny"][0] == found["org/tiny"][0]  # as it was fetched before
    assert "the hub was not reached, OfflineModeIsEnabled" in again["org/other"][1]
    assert "`hf download org/other --local-dir other`" in again["org/other"][1]
    assert not endpoint.asked


def test_nothing_but_the_config_is_fetched_of_what_is_refused(endpoint, tmp_path):
    (endpoint.folder / "generation_config.json").unlink(missing_ok=True)
    program = FETCH.replace('"refused"', '"config.json"')
    url = "http://{}:{}".format(*endpoint.server_address)
    assert ask(program, tmp_path, url, "org/tiny")["org/tiny"] == (None, "too large")
    assert set(endpoint.asked) == {"config.json"}


def test_what_does_not_fit_is_not_fetched(tmp_path, monkeypatch):
    large = json.loads((GOLDENS / "llama" / "config.json").read_text())
    large |= {"num_hidden_layers": 4000, "hidden_size": 16384, "head_dim": 256}
    large |= {"num_attention_heads": 64, "num_key_value_heads": 8, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(large))

    def fetched(name, look):
        look(tmp_path)
        pytest.fail("its weights are fetched")

    monkeypatch.setattr(model, "fetched", fetched)
    with refused(ModelError, "float32"):
        load_model("org/large")


def test_without_the_package_the_error_has_both_commands(monkeypatch):
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError) as refused:
        load_model("Qwen/Qwen2.5-7B-Instruct@v2")
    said = str(refused.value)
    assert "`pip install huggingface_hub`" in said and "\n" not in said
    fetch = "hf download Qwen/Qwen2.5-7B-Instruct --local-dir Qwen2.5-7B-Instruct --revision v2"
    assert f"`{fetch}`" in said


@pytest.mark.parametrize(
    ("path", "is_name"),
    [
        ("org/name", True),
        ("org/name@v1.2", True),
        ("org/name@refs/pr/3", True),
        ("name", False),
        ("./name", False),
        ("../name", False),
        ("a/b/c", False),
        ("models/absent", False),
        ("models/there", False),
        ("C:\\models\\x", False),
    ],
)
def test_names_and_paths(tmp_path, monkeypatch, path, is_name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "there").mkdir(parents=True)
    assert hub.is_hub_name(path) is is_name
