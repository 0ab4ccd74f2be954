"""The files under configs/ parse, and describe the models they name."""

import dataclasses
import json
from pathlib import Path

import pytest
from refusal import refused

from jaxrag.base.config import (
    LinearScaling,
    NoRotation,
    RopeConfig,
    config_from_dict,
    config_to_dict,
)
from jaxrag.base.errors import ConfigError, RequestError
from jaxrag.base.tables import build, read_toml
from jaxrag.models.overview import rope_words
from jaxrag.models.spec import num_params
from jaxrag.models.text.prompts import template_named
from jaxrag.reuse.methods import METHODS, method_named
from jaxrag.server.settings import ServerSettings

CONFIGS = Path(__file__).parents[1] / "configs"
MODELS = CONFIGS / "models"
PARAMS = {
    "llama-3-70b": 70_553_706_496,
    "llama-3-8b": 8_030_261_248,
    "mistral-7b": 7_248_023_552,
    "qwen2-7b": 7_615_616_512,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3.5-27b": 26_895_998_464,
    "synthetic-0.8m": 820352,
    "synthetic-6m": 6_164_736,
    "synthetic-hybrid-0.4m": 397_708,
}
KV_BYTES = {
    "llama-3-70b": 320 * 1024,
    "llama-3-8b": 128 * 1024,
    "mistral-7b": 128 * 1024,
    "qwen2-7b": 56 * 1024,
    "qwen2.5-0.5b": 12 * 1024,
    "qwen3.5-27b": 64 * 1024,
    "synthetic-0.8m": 4096,
    "synthetic-6m": 16 * 1024,
    "synthetic-hybrid-0.4m": 512,
}


def test_every_model_file_is_checked():
    assert {path.stem for path in MODELS.glob("*.toml")} == set(PARAMS)


@pytest.mark.parametrize("name", PARAMS)
def test_model_file(name):
    config = config_from_dict(read_toml(MODELS / f"{name}.toml"), name)
    assert num_params(config) == PARAMS[name]
    assert config.kv_bytes_per_token == KV_BYTES[name]
    assert config_from_dict(config_to_dict(config)) == config


@pytest.mark.parametrize("path", sorted((CONFIGS / "serve").glob("*.toml")), ids=lambda p: p.stem)
def test_server_file(path):
    settings = build(ServerSettings, read_toml(path), str(path))
    assert settings.model.name and settings.questions
    assert set(settings.knowledge_bases) == {path.stem}


def test_only_a_key_that_may_be_none_may_be_left_out():
    values = read_toml(MODELS / "qwen2-7b.toml")
    assert config_from_dict(values).sliding_window is None
    for key in ("norm_eps", "eos_ids", "rope"):
        with refused(ConfigError, key):
            config_from_dict({k: v for k, v in values.items() if k != key})
    with refused(ConfigError, "rope_theta"):
        config_from_dict({**values, "rope_theta": 1e4})


def test_layers_of_several_kinds(tiny_config):
    """What a config says of them comes back, and what it says without them is as it was."""
    own = tiny_config().rope
    local = RopeConfig(50.0, 10, False, LinearScaling(3.0))
    none = dataclasses.replace(own, scaling=NoRotation())
    plain = tiny_config()
    kinds = tiny_config(more_ropes=(local, none), rope_layers=(0, 2, 1))
    written = json.loads(json.dumps(config_to_dict(kinds)))
    assert config_from_dict(written) == kinds
    assert written.keys() - config_to_dict(plain).keys() == {"more_ropes", "rope_layers"}
    assert [kinds.rope_of(layer) for layer in range(3)] == [own, none, local]
    assert kinds.of_layer(2) == dataclasses.replace(plain, rope=local)
    assert plain.of_layer(2) is plain
    assert rope_words(kinds) == (
        "1 layers theta 5300; 1 layers theta 50, linear x 3; 1 layers without positions"
    )
    wrong = ((local,), None), ((), (0, 0, 1)), ((local,), (0, 1)), ((local,), (1, 1, 1))
    for more, layers in wrong:
        with refused(ConfigError, "rope_layers"):
            tiny_config(more_ropes=more, rope_layers=layers)
    for other in ({"rotary_dim": 8}, {"interleaved": True}):
        with refused(ConfigError, "more_ropes"):
            tiny_config(more_ropes=(dataclasses.replace(local, **other),), rope_layers=(0, 1, 0))
    for more in ("ab", [3], [{"theta": 1.0}]):
        with refused(ConfigError, "more_ropes"):
            config_from_dict({**written, "more_ropes": more})
    with refused(ConfigError, "theta"):
        tiny_config(more_ropes=(dataclasses.replace(local, theta=0.0),), rope_layers=(0, 1, 0))


@pytest.mark.parametrize(
    "path", sorted((CONFIGS / "templates").glob("*.toml")), ids=lambda p: p.stem
)
def test_template_file(path):
    template = template_named(str(path))
    assert template.name == path.stem
    assert "{text}" in template.chunk
    assert "{question}" in template.final


@pytest.mark.parametrize("path", sorted((CONFIGS / "methods").glob("*.toml")), ids=lambda p: p.stem)
def test_method_file(path):
    method = method_named(str(path))
    assert method.name == path.stem
    assert template_named(method.template).chunk


def test_method_files_are_strict(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('encoder = "isolated"\npositions = "composite"\n', encoding="utf-8")
    assert method_named(str(path)).positions == "composite"
    path.write_text('encodr = "isolated"\n', encoding="utf-8")
    with refused(ConfigError, "'encodr'"):
        method_named(str(path))
    with refused(RequestError, "'turbo'"):
        method_named("turbo")
    assert method_named("turborag") is METHODS["turborag"]
