"""Model directories that nobody should load: sizes, types, depth and numbers that are none."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from refusal import refused
from safetensors.numpy import load_file, save_file

from jaxrag.base.errors import ConfigError, ModelError
from jaxrag.base.tables import read_toml
from jaxrag.models import hf as of_hf
from jaxrag.models import tensor_files
from jaxrag.models.checkpoint import load_checkpoint, save_checkpoint
from jaxrag.models.hf import load_hf
from jaxrag.models.spec import init_params
from jaxrag.models.tensor_files import read_file, read_tensors

GOLDENS = Path(__file__).parent.parent / "goldens"
WEIGHTS = "model.safetensors"
DEEP = '{"a":' + "[" * 100_000
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}


@pytest.fixture
def llama(tmp_path):
    return Path(shutil.copytree(GOLDENS / "llama", tmp_path / "llama"))


def edit_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 10**400},
        {"vocab_size": 10**12},
        {"intermediate_size": 10**12},
        {"max_position_embeddings": 10**15},
        {"hidden_size": 10**9, "head_dim": 8},
        {"head_dim": 10**6},
        {"num_attention_heads": 10**6, "num_key_value_heads": 10**6},
        {"rms_norm_eps": -1},
        {"rms_norm_eps": 0},
        {"rms_norm_eps": float("nan")},
        {"rms_norm_eps": float("inf")},
        {"rope_parameters": {"rope_type": "default", "rope_theta": float("inf")}},
        {"rope_parameters": {"rope_type": "linear", "factor": 10**400}},
        {"rope_parameters": {"rope_type": ["linear"]}},
        {"eos_token_id": 1.5},
        {"eos_token_id": {"a": 1}},
        {"rms_norm_eps": 10**400},
        {"dtype": ["float32"]},
    ],
    ids=repr,
)
def test_numbers_of_a_config_that_make_no_model(llama, changes):
    if "rope_parameters" in changes:
        edit_json(llama / "config.json", rope_scaling=None, rope_theta=1e4)
    edit_json(llama / "config.json", **changes)
    with refused(ConfigError):
        load_hf(llama)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("granite", {"attention_multiplier": float("nan")}),
        ("granite", {"logits_scaling": float("inf")}),
        ("granite", {"residual_multiplier": "0.2"}),
        ("granite", {"embedding_multiplier": 10**400}),
        ("olmo2", {"num_key_value_heads": 4}),
        ("olmo3", {"num_hidden_layers": 10**9, "layer_types": None}),
        ("qwen2", {"num_hidden_layers": 10**9, "layer_types": None}),
        ("smollm3", {"num_hidden_layers": 10**9, "no_rope_layers": None}),
        ("olmo3", {"layer_types": 5}),
        ("olmo3", {"layer_types": ["full_attention", ["sliding_attention"], 3]}),
        ("olmo3", {"rope_parameters": 5}),
        ("olmo3", {"rope_parameters": {"full_attention": 5}}),
        ("olmo3", {"sliding_window": None}),
        ("olmo3", {"sliding_window": "5"}),
        ("olmo3", {"sliding_window": 0}),
        ("olmo3", {"sliding_window": -1}),
        ("olmo3", {"sliding_window": 10**30}),
        ("olmo3", {"text_config": "x"}),
        ("gemma3", {"query_pre_attn_scalar": 0}),
        ("gemma3", {"query_pre_attn_scalar": -1}),
        ("granite4", {"position_embedding_type": "alibi"}),
        ("gpt_oss", {"rope_parameters": {**YARN, "truncate": "no"}}),
        ("smollm3", {"no_rope_layers": 5}),
        ("smollm3", {"no_rope_layers": [[0], 1, 1, 1]}),
        ("smollm3", {"no_rope_layers": ["1"] * 10**5}),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": -(10**400)}),
    ],
    ids=lambda it: f"{it!r:.60}",
)
def test_parts_of_families_that_make_no_model(name, changes, tmp_path):
    directory = Path(shutil.copytree(GOLDENS / name, tmp_path / name))
    edit_json(directory / "config.json", **changes)
    with refused(ConfigError):
        load_hf(directory)


WRONG = (None, True, "x", 1.5, -1, 10**400, float("nan"), [], [None], [[]], {}, {"a": 1}, {"0": 5})


def places(values, path=()):
    """Every key of an object, and of the objects in it."""
    for key, value in values.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from places(value, (*path, key))


@pytest.mark.parametrize(
    "name",
    ["gemma2", "gemma3", "gemma4", "gemma4_experts", "glm", "glm4", "gpt_oss", "granite",
     "granite4", "llama_yarn", "mistral_window", "mixtral", "olmo2", "olmo3",
     "qwen2_mixed_window", "qwen3", "qwen3_moe", "smollm3_window"],
)  # fmt: skip
def test_no_value_of_a_config_ends_in_a_message_of_python(name):
    """Every key that is there or read, with values of every type; a line says what is wrong."""
    values = json.loads((GOLDENS / name / "config.json").read_text())
    read = of_hf._Noting(values)
    family = of_hf.find_family(values, name)
    family.read_config(read)
    ropes = {} if family.name == "gemma4" else dict.fromkeys(YARN, 1)
    more = {"rope_scaling": ropes, "rope_parameters": values.get("rope_parameters") or {}}
    whole = {**dict.fromkeys(read.asked), **values, **more}
    said = []
    for path in places(whole):
        for wrong in WRONG:
            changed = json.loads(json.dumps({**values, path[0]: whole[path[0]]}))
            inner = changed
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = wrong
            try:
                of_hf._read_config(Path("m"), changed, None)
            except (ConfigError, ModelError) as error:
                said.append(str(error))
    assert len(said) > 100
    assert not [it for it in said if "malformed" in it or "\n" in it or len(it) > 400]


@pytest.mark.parametrize(
    ("name", "key", "value", "expected"),
    [
        ("llama", "layer_types", 5, "list of names"),
        ("gemma3", "layer_types", "full_attention", "list of names"),
        ("gemma3", "rope_parameters", [1], "an object"),
        ("gemma4", "rope_parameters", {"full_attention": 5}, "full_attention=5"),
        ("gemma4", "rope_scaling", {"rope_type": "linear", "factor": 2.0}, "rope_parameters"),
        ("gemma4", "per_layer_config", {"0": 5}, "object of objects"),
        ("smollm3", "no_rope_layers", 5, "list of 0 and 1"),
        ("llama", "bos_token_id", -1, "a token id"),
        ("llama", "eos_token_id", [2, -1], "a token id"),
        ("llama", "rms_norm_eps", -10**400, "finite"),
        ("llama", "num_hidden_layers", 0, "positive"),
        ("llama", "num_key_value_heads", 10**9, "at most"),
        ("llama", "intermediate_size", -1, "positive"),
    ],
    ids=lambda it: f"{it!r:.30}",
)  # fmt: skip
def test_a_refusal_names_the_key(name, key, value, expected):
    values = json.loads((GOLDENS / name / "config.json").read_text())
    with refused(ConfigError, key, expected):
        of_hf._read_config(Path("m"), {**values, key: value}, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": 5},
        {"architectures": [5]},
        {"architectures": None, "model_type": ["llama"]},
    ],
    ids=repr,
)
def test_names_of_a_config_that_are_none(llama, changes):
    edit_json(llama / "config.json", **changes)
    with refused(ModelError):
        load_hf(llama)


def test_files_that_are_deep_or_huge(llama, tmp_path, monkeypatch):
    config = (llama / "config.json").read_bytes()
    (llama / "config.json").write_text(DEEP)
    with refused(ModelError, "config.json"):
        load_hf(llama)
    (llama / "config.json").write_bytes(config)
    monkeypatch.setattr(tensor_files, "MAX_JSON_BYTES", len(config) - 1)
    with refused(ModelError, len(config), len(config) - 1):
        load_hf(llama)
    (tmp_path / "prompt.toml").write_text("a = " + "[" * 100_000)
    with refused(ConfigError):
        read_toml(tmp_path / "prompt.toml")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 2, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": "04"},
        5,
        None,
    ],
    ids=repr,
)
def test_headers_of_other_types(tmp_path, entry):
    header = DEEP if entry is None else json.dumps({"a": entry})
    path = tmp_path / WEIGHTS
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(4))
    with refused(ModelError):
        read_file(path)


def test_a_header_beyond_the_limit_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / WEIGHTS
    save_file({"a": np.zeros(3, np.float32)}, path)
    read_file(path)
    monkeypatch.setattr(tensor_files, "MAX_HEADER_BYTES", 20)
    with refused(ModelError, "20"):
        read_file(path)


def test_an_index_that_names_no_files(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": ["b"]}}')
    with refused(ModelError, "'weight_map'"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_no_numbers_are_refused(llama, value):
    tensors = load_file(llama / WEIGHTS)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = value
    save_file(tensors, llama / WEIGHTS)
    with refused(ModelError, "'layers.down'"):
        load_hf(llama)


def test_weights_that_a_dtype_cannot_hold_are_refused(llama):
    tensors = load_file(llama / WEIGHTS)
    tensors["model.norm.weight"][0] = 1e5
    save_file(tensors, llama / WEIGHTS)
    load_hf(llama, dtype="bfloat16")
    with refused(ModelError, "'final_norm'"):
        load_hf(llama, dtype="float16")


def test_a_checkpoint_of_no_numbers_is_refused(tiny_config, tmp_path):
    config = tiny_config("llama")
    params = init_params(config, jax.random.key(0))
    save_checkpoint(
        tmp_path / "bad", params.replace(embed=params.embed.at[2, 3].set(np.nan)), config
    )
    with refused(ModelError, "'embed'"):
        load_checkpoint(tmp_path / "bad")


def test_sizes_are_refused_wherever_a_config_comes_from(tiny_config):
    with refused(ConfigError, "num_layers=1000000000"):
        dataclasses.replace(tiny_config("llama"), num_layers=10**9)


def test_the_largest_finite_numbers_are_loaded(llama):
    tensors = load_file(llama / WEIGHTS)
    tensors["model.norm.weight"][0] = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
    save_file(tensors, llama / WEIGHTS)
    load_hf(llama, dtype="bfloat16")
