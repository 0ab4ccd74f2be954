"""Safetensors files: what the reference library writes is read, and damage is named."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from refusal import refused
from safetensors.numpy import load_file, save_file

from jaxrag.base.errors import ModelError
from jaxrag.models.tensor_files import NewTensor, read_file, read_tensors, write_file

SHARDED = Path(__file__).parent.parent / "goldens" / "llama_sharded_bf16"


@pytest.fixture
def tensors(rng):
    return {
        "b": rng.normal(size=(3, 5)).astype(np.float32),
        "a": rng.normal(size=(7,)).astype(np.float16),
        "c": rng.normal(size=(2, 3, 4)).astype(ml_dtypes.bfloat16),
    }


def test_reads_what_the_library_writes(tensors, tmp_path):
    save_file(tensors, tmp_path / "model.safetensors")
    stored = read_tensors(tmp_path)
    assert set(stored) == set(tensors)
    for name, values in tensors.items():
        assert stored[name].dtype == values.dtype
        np.testing.assert_array_equal(stored[name].view(), values)
    with pytest.raises(ValueError):
        stored["a"].view()[0] = 1


def test_the_library_reads_what_is_written(tensors, tmp_path):
    path = tmp_path / "x.safetensors"
    new = [NewTensor(k, v.dtype, v.shape, lambda v=v: v) for k, v in tensors.items()]
    write_file(path, new)
    loaded = load_file(path)
    assert set(loaded) == set(tensors)
    for name, values in tensors.items():
        np.testing.assert_array_equal(loaded[name].view(np.uint8), values.view(np.uint8))
    assert all(t.start % 2 == 0 for t in read_file(path).values())


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_truncated_files_are_refused(tensors, tmp_path, kept):
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    path.write_bytes(path.read_bytes()[:kept])
    with refused(ModelError):
        read_tensors(tmp_path)


def test_damaged_headers_are_refused(tensors, tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    good = path.read_bytes()
    path.write_bytes(good[:8] + b"#" + good[9:])
    with refused(ModelError):
        read_tensors(tmp_path)
    path.write_bytes(good.replace(b"[3,5]", b"[3,6]"))
    with refused(ModelError):
        read_tensors(tmp_path)
    path.write_bytes(good + b"x")
    with refused(ModelError):
        read_tensors(tmp_path)


def test_quantized_tensors_are_refused(tmp_path):
    save_file({"w": np.ones(4, np.int8)}, tmp_path / "model.safetensors")
    with refused(ModelError, "'w'"):
        read_tensors(tmp_path)


def test_index_and_files_must_agree(tmp_path):
    directory = Path(shutil.copytree(SHARDED, tmp_path / "x"))
    index = directory / "model.safetensors.index.json"
    good = index.read_text()
    weight_map = json.loads(good)["weight_map"]
    first = sorted(weight_map)[0]

    index.write_text(json.dumps({"weight_map": {**weight_map, "ghost": weight_map[first]}}))
    with refused(ModelError, "'ghost'"):
        read_tensors(directory)
    index.write_text(
        json.dumps({"weight_map": {k: v for k, v in weight_map.items() if k != first}})
    )
    with refused(ModelError):
        read_tensors(directory)
    index.write_text(json.dumps({"weight_map": {**weight_map, first: "../outside.safetensors"}}))
    with refused(ModelError):
        read_tensors(directory)
    index.write_text(good)
    (directory / weight_map[first]).unlink()
    with refused(ModelError, weight_map[first]):
        read_tensors(directory)
