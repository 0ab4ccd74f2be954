"""`jaxrag check` of models as they are published, whose weights are holes in files."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from jaxrag.cli import main
from jaxrag.kv.cache import budget
from jaxrag.models import FAMILIES
from jaxrag.models.family import rules_of
from jaxrag.models.hf import find_family
from jaxrag.models.hf_config import text_part
from jaxrag.models.spec import by_name, param_specs

PUBLISHED = json.loads(
    (Path(__file__).parents[1] / "goldens" / "published.json").read_text(encoding="utf-8")
)
IMAGES = {"vision_tower.a.weight": (20_000, 50), "multi_modal_projector.b.weight": (100, 30)}
ISOLATED = "epic (isolated KV)"
WINDOW = ("turborag_composite, ape, retrieval_attention, kcache; each says why",)
LEFT_OUT = "vision_tower (1M) and multi_modal_projector (3k): the text part alone is read"
RECURRENT = (
    "ape, fusionrag, primed_fusion, packets, retrieval_attention, kcache; each says why",
    "methods primed (primed KV); full_attention always",
)
UNDERSTOOD = {  # what is said of each
    "llama-3.1-8b": ("LlamaForCausalLM, 8.03G", "llama3 x 8 from 8192", ISOLATED),
    "llama-3.2-1b": ("LlamaForCausalLM, 1.24G", "llama3 x 32", "tied to the embedding"),
    "llama-3.3-70b": ("LlamaForCausalLM, 70.6G", "80 of width 8192"),
    "gemma-2-9b": ("Gemma2ForCausalLM, 9.24G", "scores within 50", "BOS", *WINDOW),
    "gemma-4-31b": ("Gemma4ForCausalLM", "1024 tokens in 50 layers", LEFT_OUT, "BOS", *WINDOW),
    # Their text parts, of the sizes that are published.
    "gemma-4-e2b": ("Gemma4ForCausalLM, 4.63G", "35 of width 1536, MLP 6144; 256 inputs",
                    "512 tokens in 28 layers", "the last 20 layers take K and V of others, with an "
                    "MLP of 12288", "whose share of KV is 60%", *WINDOW),
    "gemma-4-e4b": ("Gemma4ForCausalLM, 7.46G", "42 of width 2560, MLP 10240; 256 inputs",
                    "the last 18 layers take K and V of others positions", *WINDOW),
    "gemma-3-270m": ("Gemma3ForCausalLM, 268M", "512 tokens in 15 layers", "BOS", *WINDOW),
    "gemma-3-1b": ("Gemma3ForCausalLM, 1G", "512 tokens in 22 layers", *WINDOW),
    "gemma-3-4b": ("Gemma3ForCausalLM, 3.88G", "5 layers theta 1e+06, linear x 8", LEFT_OUT),
    "gemma-3-27b": ("Gemma3ForCausalLM, 27G", "scores x 0.07715", LEFT_OUT, *WINDOW),
    "qwen3-30b-a3b": ("Qwen3MoeForCausalLM, 30.5G parameters, a token meets 3.35G",
                      "128 experts of 768, 8 for a token", ISOLATED),
    "gpt-oss-20b": ("GptOssForCausalLM, 20.9G", "32 experts of 2880, 4 for a token", "mxfp4",
                    "128 tokens in 12 layers; a sink logit of each head", *WINDOW),
    "gpt-oss-120b": ("GptOssForCausalLM, 117G parameters, a token meets 5.71G", "mxfp4"),
    "smollm3-3b": ("SmolLM3ForCausalLM, 3.08G", "9 layers without positions", ISOLATED),
    "olmo-2-7b": ("Olmo2ForCausalLM, 7.3G", "norms after attention and MLP alone", ISOLATED),
    "olmo-3-7b": ("Olmo3ForCausalLM, 7.3G", "4096 tokens in 24 layers", "8 layers theta 500000, "
                  "yarn x 8 from 8192", *WINDOW),
    "granite-3.3-8b": ("GraniteForCausalLM, 8.17G", "embeddings x 12", ISOLATED),
    "granite-4.0-micro": ("GraniteMoeHybridForCausalLM, 3.4G", "logits x 0.1", ISOLATED),
    "mixtral-8x7b": ("MixtralForCausalLM, 46.7G parameters, a token meets 12.9G", ISOLATED),
    "mistral-small-3-24b": ("MistralForCausalLM, 23.6G", "theta 1e+08", ISOLATED),
    "qwen3-next-80b-a3b": ("Qwen3NextForCausalLM, 79.7G parameters, a token meets 3.87G",
                           "512 experts of 512, 10 for a token and one of 512", "theta 10000, 64 "
                           "of 256 dimensions", "; 36 layers keep a state of 32 heads of 128 x 128 "
                           "in place of KV", *RECURRENT),
    "qwen3.5-9b": ("Qwen3_5ForCausalLM, 8.95G", "24 layers keep a state of 32 heads", LEFT_OUT,
                   *RECURRENT),
    "qwen3.5-35b-a3b": ("Qwen3_5MoeForCausalLM, 34.7G", "256 experts of 512, 8 for a token and one",
                        "30 layers keep a state", LEFT_OUT, *RECURRENT),
    "mistral-small-3.2-24b": ("MistralForCausalLM, 23.6G", "theta 1e+09", LEFT_OUT, ISOLATED),
}  # fmt: skip
REFUSED = {
    "granite-4.0-h-micro": "layer_types contains 'linear_attention': recurrent layers",
    "ministral-3-8b": "queries are multiplied by what depends on their position",
    "llama-4-scout": "sees the tokens of its own 8192 positions",
    "deepseek-v3": "latents, from which K and V are made (MLA)",
}


def test_every_one_is_understood_or_refused():
    assert set(PUBLISHED) == {*UNDERSTOOD, *REFUSED}


def parts_in_mxfp4(name, shape):
    """Of a tensor of experts [E, in, out] the two that gpt-oss is published with."""
    count, inner, outer = shape
    return {f"{name}_blocks": (count, outer, inner // 32, 16),
            f"{name}_scales": (count, outer, inner // 32)}  # fmt: skip


def heads_of_sizes(config):
    """Of every layer of a Gemma 4 the tensors of its heads; V is not there where it is K."""
    shapes, heads, width = {}, config.num_heads, config.model_dim
    for layer, (own, parts) in enumerate(zip(config.own_kv_heads, config.head_parts, strict=True)):
        size, stem = config.head_dim // parts, f"model.layers.{layer}.self_attn."
        shapes |= {f"{stem}{it}_norm.weight": (size,) for it in "qk"}
        shapes |= {f"{stem}{it}_proj.weight": (own * size, width) for it in "kv"}
        shapes[f"{stem}q_proj.weight"] = (heads * size, width)
        shapes[f"{stem}o_proj.weight"] = (width, heads * size)  # K and V of no use are there too
        if not config.window_layers[layer] and config.keys_as_values:
            shapes[f"{stem}v_proj.weight"] = None
    return shapes


def directory(path, hf):
    """Config, and tensors of the right shapes without a byte on the disk."""
    family = find_family(hf, "")
    config = family.read_config(text_part(hf))
    specs, shapes = by_name(param_specs(config)), {}
    for rule in rules_of(family.tensors, config):
        if rule.paths[0] not in specs:
            continue
        shape = specs[rule.paths[0]].shape
        for at in np.ndindex(shape[: rule.repeats]):
            shapes[rule.name(at)] = rule.file_shape(shape[rule.repeats :])
    if config.own_kv_heads is not None:
        shapes |= heads_of_sizes(config)
        shapes = {name: shape for name, shape in shapes.items() if shape}
    if "quantization_config" in hf:
        packed = [it for it in shapes if it.endswith(("gate_up_proj", "down_proj"))]
        for name in packed:
            shapes |= parts_in_mxfp4(name, shapes.pop(name))
    if "text_config" in hf:
        shapes = {f"language_model.{name}": it for name, it in shapes.items()} | IMAGES
    header, end = {}, 0
    for name, shape in shapes.items():
        quantised = name.endswith(("_blocks", "_scales"))
        start, end = end, end + math.prod(shape) * (1 if quantised else 2)
        header[name] = {"dtype": "U8" if quantised else "BF16", "shape": shape,
                        "data_offsets": [start, end]}  # fmt: skip
    text = json.dumps(header).encode()
    path.mkdir()
    (path / "config.json").write_text(json.dumps(hf))
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_it_is_understood(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(budget, "_system_bytes", lambda: 1 << 40)
    monkeypatch.setattr(budget, "_container_bytes", lambda: None)
    directory(tmp_path / name, PUBLISHED[name]["config"])
    assert main(["check", str(tmp_path / name), "--quick"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for words in UNDERSTOOD[name]:
        assert words in said, said
    if RECURRENT[0] not in said:
        assert "methods primed (primed KV), primed_fusion (primed KV), cacheblend" in said
    assert 'jaxrag ask "QUESTION" --kb kb jaxrag kb gate' in said  # the first is the default
    windowed = WINDOW[0] in said
    assert windowed == ("sliding window" in said)
    assert ("not here" in said) == (windowed or RECURRENT[0] in said)
    assert ("left out" in said) == ("text_config" in PUBLISHED[name]["config"])
    assert "hidden_size" not in said.partition("ignored")[2]


@pytest.mark.parametrize("name", [it for it in PUBLISHED if "older" in PUBLISHED[it]])
def test_the_older_form_says_the_same(name):
    newer, older = PUBLISHED[name]["config"], PUBLISHED[name]["older"]
    assert newer != older
    family = find_family(newer, "")
    assert family.read_config(older) == family.read_config(newer)


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name, tmp_path, capsys):
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(json.dumps(PUBLISHED[name]["config"]))
    assert main(["check", str(tmp_path / name), "--quick"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert REFUSED[name] in err and len(err) < 300 + len(str(tmp_path))


def test_of_another_text_part_nothing_is_read():
    """A wrapper is of the family that its text part is of."""
    hf = PUBLISHED["mistral-small-3.2-24b"]["config"]
    assert find_family(hf, "") is FAMILIES["mistral"]
    text = {**hf["text_config"], "model_type": "qwen2"}
    with pytest.raises(Exception, match="Mistral3ForConditionalGeneration is not supported"):
        find_family({**hf, "text_config": text}, "")
