"""Hugging Face -> ours -> Hugging Face gives the same bytes, and nothing is left half-written."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import ConfigError, ModelError
from jaxrag.models.checkpoint import is_checkpoint
from jaxrag.models.export import convert, export_hf
from jaxrag.models.hf import load_config, load_hf
from jaxrag.models.model import load_model
from jaxrag.models.tensor_files import read_tensors
from jaxrag.models.text.prompts import PromptTemplate

GOLDENS = Path(__file__).parent.parent / "goldens"
NAMES = sorted(path.parent.name for path in GOLDENS.glob("*/config.json"))


@pytest.mark.parametrize("name", [it for it in NAMES if not it.startswith("gemma4")])
def test_round_trip_is_bit_exact(name, tmp_path):
    assert convert(GOLDENS / name, tmp_path / "ours") == "jaxrag"
    assert is_checkpoint(tmp_path / "ours")
    assert convert(tmp_path / "ours", tmp_path / "back", to="huggingface") == "huggingface"
    wanted, got = read_tensors(GOLDENS / name), read_tensors(tmp_path / "back")
    assert set(got) == set(wanted)
    for key, tensor in wanted.items():
        assert (got[key].dtype, got[key].shape) == (tensor.dtype, tensor.shape), key
        np.testing.assert_array_equal(got[key].raw, tensor.raw, err_msg=key)
    assert load_config(tmp_path / "back") == load_config(GOLDENS / name)


def test_stored_values_survive_a_narrower_config(tmp_path):
    source = shutil.copytree(GOLDENS / "llama", tmp_path / "source")
    hf = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**hf, "dtype": "bfloat16"}))
    convert(source, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back")
    for key, tensor in read_tensors(source).items():
        np.testing.assert_array_equal(read_tensors(tmp_path / "back")[key].raw, tensor.raw)
    assert load_config(tmp_path / "back").dtype == "bfloat16"


def test_tokenizer_files_go_along(tmp_path):
    source = shutil.copytree(GOLDENS / "llama", tmp_path / "source")
    (source / "additional_chat_templates").mkdir()
    prompt = 'prefix = ""\nchunk = "{text}"\nfinal = "{question}"\n'
    files = {
        "tokenizer_config.json": "{}",
        "additional_chat_templates/rag.jinja": "x",
        "prompt.toml": prompt,
        "reading.toml": 'block_positions = ["reordered"]\n',
    }
    for name, text in files.items():
        (source / name).write_text(text)
    convert(source, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back")
    for name, text in files.items():
        assert (tmp_path / "back" / name).read_text() == text


def test_the_prompt_format_of_an_export(model_dir, tiny_config, random_params, tmp_path):
    given = PromptTemplate("any name", "Read:", "{text}.", "{question}", chunk_order="document")
    config = tiny_config(vocab_size=600)
    export_hf(tmp_path / "a", random_params(config), config, model_dir, template=given)
    expected = dataclasses.replace(given, name="prompt")
    assert load_model(tmp_path / "a").template == expected
    convert(tmp_path / "a", tmp_path / "b")
    assert load_model(tmp_path / "b").template == expected
    export_hf(tmp_path / "c", random_params(config), config, tmp_path / "a")
    assert load_model(tmp_path / "c").template == expected
    export_hf(tmp_path / "d", random_params(config), config, model_dir)
    assert load_model(tmp_path / "d").template is None
    (tmp_path / "d" / "prompt.toml").write_text("prefix = 3")
    with refused(ConfigError, "prompt.toml"):
        load_model(tmp_path / "d")


def test_large_weights_are_split_and_load_again(tiny_config, random_params, tmp_path):
    config = tiny_config("glm4")
    params = random_params(config)
    export_hf(tmp_path / "x", params, config, max_file_bytes=30_000)
    sizes = [path.stat().st_size for path in (tmp_path / "x").glob("*.safetensors")]
    assert len(sizes) > 1
    assert max(sizes) < 40_000
    index = json.loads((tmp_path / "x" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    got_config, got, _ = load_hf(tmp_path / "x")
    assert got_config == config
    jax.tree.map(np.testing.assert_array_equal, got, params)


def test_a_config_its_family_cannot_express_is_refused(tiny_config, random_params, tmp_path):
    config = tiny_config("qwen2", mlp_bias=True)
    params = random_params(config)
    with refused(ConfigError, "mlp_bias=True"):
        export_hf(tmp_path / "x", params, config)
    assert not (tmp_path / "x").exists()


def test_what_cannot_be_converted(tmp_path):
    with refused(ModelError):
        convert(tmp_path / "absent", tmp_path / "x")
    with refused(ModelError):
        convert(tmp_path, tmp_path / "x")
    with refused(ModelError, "'huggingface'"):
        convert(GOLDENS / "llama", tmp_path / "x", to="huggingface")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("mine")
    with refused(ModelError):
        convert(GOLDENS / "llama", tmp_path / "full")
    assert (tmp_path / "full" / "note").read_text() == "mine"


def test_a_failed_conversion_leaves_nothing(tmp_path):
    source = shutil.copytree(GOLDENS / "llama", tmp_path / "source")
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with refused(ModelError):
        convert(source, tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
