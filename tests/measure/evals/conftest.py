"""A random model that speaks the language of the synthetic task."""

import functools
from pathlib import Path

import jax
import pytest

from jaxrag.models.export import export_hf
from jaxrag.models.model import load_model
from jaxrag.models.spec import init_params
from jaxrag.models.text.prompts import template_named

ROOT = Path(__file__).parents[3]
TOKENIZER = ROOT / "configs" / "tokenizers" / "synthetic"
TEMPLATE = ROOT / "configs" / "templates" / "short.toml"


@pytest.fixture(scope="session")
def village_dir(tmp_path_factory, tiny_config):
    """A Hugging Face directory with prompt.toml. Every third token ends an answer."""
    ends = tuple(i for i in range(600) if i % 3 == 2)
    config = tiny_config(vocab_size=600, num_layers=2, max_positions=1024, eos_ids=ends)
    directory = tmp_path_factory.mktemp("village") / "model"
    template = template_named(str(TEMPLATE))
    params = init_params(config, jax.random.key(5))
    export_hf(directory, params, config, TOKENIZER, template=template)
    return directory


@pytest.fixture(scope="session")
def village_model(village_dir):
    """The model of ``village_dir``."""
    return load_model(village_dir, cache_tokens=8192)


@pytest.fixture
def jaxrag(jaxrag):
    """Run `jaxrag eval` in this process: exit code, stdout, stderr."""
    return functools.partial(jaxrag, "eval")
