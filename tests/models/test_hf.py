"""Loading Hugging Face directories: strict both ways, cast on the way, each shard placed once."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from refusal import refused
from safetensors.numpy import load_file, save_file

from jaxrag.base.errors import ConfigError, ModelError
from jaxrag.models import hf
from jaxrag.models.hf import load_config, load_hf, load_params, place
from jaxrag.models.spec import by_name

GOLDENS = Path(__file__).parent.parent / "goldens"


@pytest.fixture
def llama(tmp_path):
    return Path(shutil.copytree(GOLDENS / "llama", tmp_path / "llama"))


def edit_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_weights_arrive_in_our_layout(llama):
    config, params, tokenizer = load_hf(llama)
    stored = load_file(llama / "model.safetensors")
    assert tokenizer is None
    assert config.head_dim == 10
    q = stored["model.layers.1.self_attn.q_proj.weight"]  # [N * H, D]
    np.testing.assert_array_equal(params.layers.q[1, :, 4, 7], q[4 * 10 + 7])
    o = stored["model.layers.0.self_attn.o_proj.weight"]  # [D, N * H]
    np.testing.assert_array_equal(params.layers.o[0, 5, 3], o[:, 5 * 10 + 3])
    np.testing.assert_array_equal(params.lm_head, stored["lm_head.weight"].T)


def test_fused_gate_and_up_are_split():
    _, params, _ = load_hf(GOLDENS / "glm4")
    stored = load_file(GOLDENS / "glm4" / "model.safetensors")
    fused = stored["model.layers.1.mlp.gate_up_proj.weight"]
    np.testing.assert_array_equal(params.layers.gate[1], fused[:37].T)
    np.testing.assert_array_equal(params.layers.up[1], fused[37:].T)


def test_dtype_of_config_of_argument_and_of_the_file():
    directory = GOLDENS / "llama_sharded_bf16"
    config, params, _ = load_hf(directory)
    assert config.dtype == "bfloat16"
    assert params.embed.dtype == jax.numpy.bfloat16
    config, wide, _ = load_hf(directory, dtype="float32")
    assert config.dtype == "float32"
    np.testing.assert_array_equal(wide.layers.down, params.layers.down.astype("float32"))
    kept = load_params(GOLDENS / "llama_fp16", load_config(GOLDENS / "llama_fp16"))
    assert kept.embed.dtype == np.float16


def test_config_without_a_dtype_takes_that_of_the_weights(tmp_path):
    directory = Path(shutil.copytree(GOLDENS / "llama_fp16", tmp_path / "x"))
    edit_json(directory / "config.json", dtype=None)
    assert load_config(directory).dtype == "float16"


def test_end_of_sequence_ids_of_both_files(llama):
    edit_json(llama / "generation_config.json", eos_token_id=[7, 2])
    edit_json(llama / "config.json", eos_token_id=9)
    assert load_config(llama).eos_ids == (7, 2, 9)


@pytest.mark.parametrize("spec", [("a", "b"), ("b",), (None, "a"), ()])
def test_each_distinct_shard_is_read_once(spec):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    data = np.arange(8 * 12, dtype=np.float32).reshape(8, 12)
    reads = []

    def read(index):
        reads.append(tuple((part.start, part.stop) for part in index))
        return data[index].copy()

    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    array = place(data.shape, read, sharding)
    assert len(reads) == len(set(reads)) == 96 // np.prod(sharding.shard_shape(data.shape))
    assert array.sharding == sharding
    np.testing.assert_array_equal(array, data)


@pytest.mark.parametrize("name", ["llama_bias", "glm4"])
def test_loading_onto_a_mesh_reads_only_the_slices(name, monkeypatch):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    config = load_config(GOLDENS / name)
    plain = load_params(GOLDENS / name, config)
    largest = []
    read = hf._read_slice

    def watch(source, spec, dtype, index):
        block = read(source, spec, dtype, index)
        largest.append(block.size / np.prod(spec.shape))
        return block

    monkeypatch.setattr(hf, "_read_slice", watch)
    halves = [
        NamedSharding(mesh, PartitionSpec(*(["a"] if leaf.shape[0] % 2 == 0 else [])))
        for leaf in jax.tree.leaves(plain)
    ]
    shardings = jax.tree.unflatten(jax.tree.structure(plain), halves)
    params = load_params(GOLDENS / name, config, shardings=shardings)
    assert max(largest) <= 1
    assert len(largest) == sum(1 if s.spec == PartitionSpec() else 2 for s in halves)
    for key, leaf in by_name(params).items():
        assert leaf.sharding == by_name(shardings)[key]
        np.testing.assert_array_equal(leaf, by_name(plain)[key])


def test_ignorable_and_equal_tied_tensors_are_accepted(tmp_path):
    directory = Path(shutil.copytree(GOLDENS / "llama_tied", tmp_path / "x"))

    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(5, np.float32)

    edit_weights(directory, add)
    assert load_hf(directory)[1].lm_head is None

    def differ(tensors):
        tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1

    edit_weights(directory, differ)
    with refused(ModelError, "tie_word_embeddings"):
        load_hf(directory)


def test_missing_left_over_and_misshapen_tensors(llama):
    original = (llama / "model.safetensors").read_bytes()
    edit_weights(llama, lambda tensors: tensors.pop("model.norm.weight"))
    with refused(ModelError, "'model.norm.weight'"):
        load_hf(llama)
    (llama / "model.safetensors").write_bytes(original)
    edit_weights(llama, lambda tensors: tensors.update(extra=np.ones(3, np.float32)))
    with refused(ModelError, "'extra'"):
        load_hf(llama)
    (llama / "model.safetensors").write_bytes(original)
    edit_json(llama / "config.json", intermediate_size=40)
    with refused(ModelError, "37"):
        load_hf(llama)


def test_directories_that_are_no_models(tmp_path):
    with refused(ModelError):
        load_hf(tmp_path / "absent")
    with refused(ModelError, "config.json"):
        load_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with refused(ModelError):
        load_hf(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    with refused(ModelError, "GPT2LMHeadModel"):
        load_hf(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "dtype": "x"}')
    with refused(ConfigError, tmp_path):
        load_hf(tmp_path)
    edit_json(tmp_path / "config.json", dtype="float32")
    with refused(ModelError, "model.safetensors"):
        load_hf(tmp_path)


def test_unknown_dtype_argument_is_refused():
    with refused(ConfigError, "'int8'"):
        load_hf(GOLDENS / "llama", dtype="int8")


def test_config_is_frozen_and_hashable():
    config = load_config(GOLDENS / "llama")
    assert hash(config) == hash(dataclasses.replace(config))
