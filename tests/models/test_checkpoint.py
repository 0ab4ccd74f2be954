"""Orbax checkpoints: saved whole or not at all, restored onto any mesh, damage refused."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from refusal import refused

from jaxrag.base.errors import ModelError
from jaxrag.models.checkpoint import is_checkpoint, load_checkpoint, save_checkpoint
from jaxrag.models.spec import by_name, from_names, param_shardings


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tiny_config, random_params):
    config = tiny_config("qwen2")
    params = random_params(config)
    directory = tmp_path_factory.mktemp("saved") / "model"
    save_checkpoint(directory, params, config)
    return directory, params, config


def assert_same(got, wanted):
    got, wanted = by_name(got), by_name(wanted)
    assert set(got) == set(wanted)
    for name, leaf in wanted.items():
        np.testing.assert_array_equal(got[name], leaf, err_msg=name)


def test_names_are_inverse(saved):
    _, params, _ = saved
    assert "layers.q_bias" in by_name(params)
    assert "lm_head" not in by_name(params)
    assert_same(from_names(by_name(params)), params)


def test_restores_what_was_saved(saved):
    directory, params, config = saved
    assert is_checkpoint(directory)
    got_config, got, tokenizer = load_checkpoint(directory)
    assert (got_config, tokenizer) == (config, None)
    assert_same(got, params)


def test_restores_onto_a_mesh(saved):
    directory, params, config = saved
    mesh = jax.make_mesh((1, 4, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    _, got, _ = load_checkpoint(directory, mesh=mesh)
    assert_same(got, params)
    assert by_name(got)["layers.q"].sharding == by_name(param_shardings(config, mesh))["layers.q"]
    assert len(got.layers.q.devices()) == 8


def test_saves_from_a_mesh(saved, tmp_path):
    _, params, config = saved
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    sharded = jax.device_put(params, param_shardings(config, mesh))
    save_checkpoint(tmp_path / "x", sharded, config)
    assert_same(load_checkpoint(tmp_path / "x")[1], params)


def test_dtype_is_cast_on_the_way(saved):
    directory, params, _ = saved
    config, got, _ = load_checkpoint(directory, dtype="bfloat16")
    assert config.dtype == "bfloat16"
    np.testing.assert_array_equal(got.layers.q, params.layers.q.astype("bfloat16"))


def test_an_existing_directory_is_refused(saved, tmp_path):
    _, params, config = saved
    (tmp_path / "note").write_text("mine")
    with refused(ModelError):
        save_checkpoint(tmp_path, params, config)
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


def test_a_failed_save_leaves_nothing(saved, tmp_path, monkeypatch):
    _, params, config = saved

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("jaxrag.models.checkpoint.write_record", fail)
    with pytest.raises(OSError):
        save_checkpoint(tmp_path / "x", params, config)
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_belong_together_is_refused(saved, tmp_path):
    directory, _, config = saved
    copy = shutil.copytree(directory, tmp_path / "x")
    record = json.loads((copy / "jaxrag.json").read_text())

    def with_config(**changes):
        record["config"].update(changes)
        (copy / "jaxrag.json").write_text(json.dumps(record))

    with_config(mlp_dim=64)
    with refused(ModelError, "3"):
        load_checkpoint(copy)
    with_config(mlp_dim=config.mlp_dim, qkv_bias=False)
    with refused(ModelError, "'layers.k_bias'"):
        load_checkpoint(copy)
    with_config(qkv_bias=True, tie_embeddings=False)
    with refused(ModelError, "'lm_head'"):
        load_checkpoint(copy)
    record["version"] = 99
    with_config(tie_embeddings=True)
    with refused(ModelError, "99"):
        load_checkpoint(copy)
    (copy / "jaxrag.json").unlink()
    with refused(ModelError, "jaxrag.json"):
        load_checkpoint(copy)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_files_are_named(saved, tmp_path, damage):
    copy = shutil.copytree(saved[0], tmp_path / "x")
    files = [path for path in (copy / "params").rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        content = path.read_bytes()
        if damage == "remove":
            path.unlink()
        else:
            middle = len(content) // 2
            flipped = bytes([content[middle] ^ 1])
            rest = b"" if damage == "cut" else flipped + content[middle + 1 :]
            path.write_bytes(content[:middle] + rest)
        with refused(ModelError, path.name):
            load_checkpoint(copy)
        path.write_bytes(content)
    load_checkpoint(copy)


def test_config_is_kept_whole(saved, tmp_path):
    _, params, config = saved
    config = dataclasses.replace(config, dtype="bfloat16", eos_ids=(4, 2), bos_id=None)
    save_checkpoint(tmp_path / "x", params, config)
    assert load_checkpoint(tmp_path / "x")[0] == config
