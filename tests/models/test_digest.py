"""The weights digest: of the content, not of the files; remembered only where it pays."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from jaxrag.models import digest
from jaxrag.models.checkpoint import save_checkpoint
from jaxrag.models.digest import cache_directory, params_digest, weights_digest
from jaxrag.models.export import export_hf
from jaxrag.models.hf import load_hf

LLAMA = Path(__file__).parent.parent / "goldens" / "llama"


@pytest.fixture
def directory(tmp_path):
    return Path(shutil.copytree(LLAMA, tmp_path / "llama"))


def test_it_does_not_depend_on_the_sharding_into_files(tmp_path):
    config, params, _ = load_hf(LLAMA)
    export_hf(tmp_path / "one", params, config)
    export_hf(tmp_path / "many", params, config, max_file_bytes=20_000)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert weights_digest(tmp_path / "one") == weights_digest(tmp_path / "many")


def test_one_changed_value_or_name_changes_it(directory):
    before = weights_digest(directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][3] += 1e-6
    save_file(tensors, path)
    changed = weights_digest(directory)
    tensors["model.norm.bias"] = tensors.pop("model.norm.weight")
    save_file(tensors, path)
    assert len({before, changed, weights_digest(directory)}) == 3


def test_a_checkpoint_knows_the_digest_of_its_parameters(tmp_path):
    config, params, _ = load_hf(LLAMA)
    save_checkpoint(tmp_path / "x", params, config)
    assert weights_digest(tmp_path / "x") == params_digest(params)
    _, narrow, _ = load_hf(LLAMA, dtype="bfloat16")
    assert params_digest(narrow) != params_digest(params)


def test_blocks_do_not_change_the_digest(monkeypatch):
    _, params, _ = load_hf(LLAMA)
    whole = params_digest(params)
    monkeypatch.setattr(digest, "_BLOCK", 1000)
    assert params_digest(params) == whole


def test_large_weights_are_hashed_once(directory, tmp_path, monkeypatch):
    monkeypatch.setattr(digest, "_WORTH_REMEMBERING", 0)
    memo = tmp_path / "cache" / "weights.json"
    first = weights_digest(directory, memo)
    hashed = []
    real = digest._tensors_digest
    monkeypatch.setattr(digest, "_tensors_digest", lambda t: hashed.append(1) or real(t))
    assert weights_digest(directory, memo) == first
    assert not hashed
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, directory / "model.safetensors")
    assert weights_digest(directory, memo) != first
    assert hashed
    memo.write_text("{broken")
    assert weights_digest(directory, memo) != first
    assert str(directory) in json.loads(memo.read_text())


def test_a_memo_that_cannot_be_written_is_no_error(directory, tmp_path, monkeypatch):
    monkeypatch.setattr(digest, "_WORTH_REMEMBERING", 0)
    (tmp_path / "file").write_text("")
    plain = weights_digest(directory, tmp_path / "memo.json")
    assert weights_digest(directory, tmp_path / "file" / "memo.json") == plain


def test_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "jaxrag"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "jaxrag"
