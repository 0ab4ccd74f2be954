"""Weights in MXFP4, as gpt-oss is published: their values, digests, and what is refused."""

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from refusal import refused
from safetensors.numpy import load_file, save_file

from jaxrag.base.errors import ConfigError, ModelError
from jaxrag.models.digest import weights_digest
from jaxrag.models.export import export_hf
from jaxrag.models.hf import load_config, load_params
from jaxrag.models.mxfp4 import joined
from jaxrag.models.overview import overview
from jaxrag.models.spec import init_params
from jaxrag.models.tensor_files import read_tensors

GOLDEN = Path(__file__).parent.parent / "goldens" / "mxfp4.npz"
QUANTISED = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
UP = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def plain_dir(tiny_config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt-oss") / "plain"
    config = tiny_config(
        "gpt_oss", model_dim=32, mlp_dim=64, num_layers=1, window_layers=None, dtype="bfloat16"
    )
    export_hf(folder, init_params(config, jax.random.key(3)), config)
    return folder


@pytest.fixture(scope="module")
def packed(plain_dir, tmp_path_factory):
    """The same model with random blocks in the place of the experts' matrices, and their values."""
    rng, folder = np.random.default_rng(5), tmp_path_factory.mktemp("gpt-oss") / "packed"
    folder.mkdir()
    tensors, values = load_file(plain_dir / "model.safetensors"), {}
    for name in [UP, UP.replace("gate_up", "down")]:
        count, inner, outer = tensors.pop(name).shape
        blocks = rng.integers(0, 256, (count, outer, inner // 32, 16), dtype=np.uint8)
        scales = rng.integers(120, 128, (count, outer, inner // 32), dtype=np.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values[name] = unpacked(blocks, scales).swapaxes(1, 2)
    save_file(tensors, folder / "model.safetensors")
    hf = json.loads((plain_dir / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(hf | {"quantization_config": QUANTISED}))
    return folder, values


def unpacked(blocks, scales):
    """By the definition, a number at a time: sign, two bits of exponent, one of fraction."""
    out = np.empty((*scales.shape, 32))
    for at in np.ndindex(scales.shape):
        for i in range(32):
            bits = int(blocks[at][i // 2]) >> (4 * (i % 2)) & 15
            exponent, fraction = bits >> 1 & 3, bits & 1
            size = (1 + fraction / 2) * 2 ** (exponent - 1) if exponent else fraction / 2
            out[at][i] = (-size if bits & 8 else size) * 2.0 ** (int(scales[at]) - 127)
    return out.reshape(*scales.shape[:-1], -1)


def files(folder, **tensors):
    save_file(tensors, folder / "model.safetensors")
    return joined(read_tensors(folder))


def test_values_are_those_of_transformers(tmp_path):
    with np.load(GOLDEN) as golden:
        found = files(tmp_path, a_blocks=golden["blocks"], a_scales=golden["scales"])
        assert list(found) == ["a"]
        got = found["a"].view()
        assert got.shape == found["a"].shape
        assert got.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(got.astype(np.float32), golden["values"])
        np.testing.assert_array_equal(
            golden["values"].swapaxes(1, 2), unpacked(golden["blocks"], golden["scales"])
        )


def test_a_published_model_loads(packed):
    folder, values = packed
    config = load_config(folder)
    assert config.experts.count == 5
    layers = load_params(folder, config).layers
    fused = values[UP]
    np.testing.assert_array_equal(layers.gate[0].astype(np.float32), fused[..., ::2])
    np.testing.assert_array_equal(layers.up[0].astype(np.float32), fused[..., 1::2])
    down = values[UP.replace("gate_up", "down")]
    np.testing.assert_array_equal(layers.down[0].astype(np.float32), down)


def test_what_is_understood_of_it(packed, plain_dir):
    ours, plain = overview(packed[0]), overview(plain_dir)
    assert ours.files.dtypes == ("bfloat16", "mxfp4")
    assert ours.files.parameters == plain.files.parameters
    assert "quantization_config" not in ours.ignored
    assert ours.config == plain.config


def test_every_byte_is_in_the_digest(packed, tmp_path):
    folder, _ = packed
    tensors = load_file(folder / "model.safetensors")
    found = set()
    for name in (None, f"{UP}_blocks", f"{UP}_scales"):
        changed = {key: it.copy() for key, it in tensors.items()}
        if name is not None:
            changed[name].flat[3] ^= 1
        save_file(changed, tmp_path / "model.safetensors")
        found.add(weights_digest(tmp_path))
    assert len(found) == 3


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"a_blocks": (2, 3, 1, 16)}, "has no scales"),
        ({"a_blocks": (2, 3, 2, 16), "a_scales": (2, 3, 1)}, "has scales [2, 3, 1]"),
        ({"a_blocks": (2, 3, 1, 8), "a_scales": (2, 3, 1)}, "expected 'a_scales'"),
        ({"a_blocks": (3, 1, 16), "a_scales": (3, 1)}, "expected 'a_scales'"),
    ],
)
def test_blocks_that_are_none(tmp_path, shapes, words):
    with refused(ModelError, words):
        files(tmp_path, **{name: np.zeros(shape, np.uint8) for name, shape in shapes.items()})


def test_other_bytes_are_no_weights(packed, tmp_path):
    folder, _ = packed
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = np.zeros(32, np.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with refused(ModelError, "dtype uint8"):
        load_params(tmp_path, load_config(tmp_path))


def test_another_quantisation_is_refused(plain_dir, tmp_path):
    hf = json.loads((plain_dir / "config.json").read_text())
    quantised = {"quantization_config": {"quant_method": "gptq"}}
    (tmp_path / "config.json").write_text(json.dumps(hf | quantised))
    with refused(ConfigError, "quantization_config"):
        load_config(tmp_path)
