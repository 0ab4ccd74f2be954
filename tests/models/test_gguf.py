"""GGUF files are read as the Hugging Face directories that they were made of, or refused."""

import dataclasses
import itertools
import json
import math
import shutil
import struct

import gguf
import gguf_files
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf_files import GOLDENS, byte_level, paired, sentence_pieces, write
from refusal import refused
from safetensors.numpy import load_file, save_file

from jaxrag.base.config import ExpertsConfig, RopeConfig, YarnScaling
from jaxrag.base.errors import ConfigError, ModelError, TokenizerError
from jaxrag.base.gguf import read_header
from jaxrag.cli import main
from jaxrag.measure.zoo import llama
from jaxrag.models.digest import params_digest, weights_digest
from jaxrag.models.export import convert, export_hf
from jaxrag.models.gguf import QUANTISED, stored_tensors
from jaxrag.models.hf import load_config, load_hf, load_params
from jaxrag.models.hub import is_hub_name
from jaxrag.models.model import load_model
from jaxrag.models.text.gguf import PATTERNS
from jaxrag.models.text.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "the loa"}]


@pytest.fixture(scope="module")
def wide(tmp_path_factory, random_params):
    """A model whose rows hold whole blocks of every type."""
    config = llama(vocab_size=270, num_layers=1, model_dim=256, mlp_dim=512, num_heads=4,
                   num_kv_heads=2, head_dim=64, max_positions=256, dtype="float32")  # fmt: skip
    directory = tmp_path_factory.mktemp("wide") / "hf"
    export_hf(directory, random_params(config), config)
    return directory


@pytest.mark.parametrize(
    "name",
    ["llama", "llama_bias", "llama_tied", "llama_linear", "llama_yarn", "llama_llama3",
     "llama_fp16", "mistral_window", "qwen2", "qwen3", "qwen3_moe_normalised", "granite",
     "granite_bias", "glm", "glm4", "olmo2", "olmo2_bias", "olmo3", "olmo3_every_fourth", "smollm3",
     "mixtral", "mixtral_window"],
)  # fmt: skip
def test_a_file_is_the_directory_it_was_made_of(name, tmp_path):
    path = write(tmp_path / "model.gguf", GOLDENS / name)
    config, params, tokenizer = load_hf(path)
    wanted, theirs, _ = load_hf(GOLDENS / name, dtype="float32")
    assert config == wanted
    assert params_digest(params) == params_digest(theirs)
    assert tokenizer is None


def test_logits_are_those_of_the_directory(tmp_path):
    path = write(tmp_path / "model.gguf", GOLDENS / "llama", architecture="mistral")
    golden = np.load(GOLDENS / "llama" / "expected.npz")
    model = load_model(path, cache_tokens=256)
    assert model.config.family == "mistral"
    ids, logits = golden["ids"], golden["logits"]
    np.testing.assert_allclose(model.logits(ids), logits, atol=1e-4)


@pytest.mark.parametrize("name", ["glm", "glm4"])
def test_q_k_and_v_in_one_tensor_are_three(name, tmp_path, monkeypatch):
    """As older files of GLM-4 have them."""
    plain = gguf_files.stacked

    def joined(directory):
        found = plain(directory)
        for key in [it for it in found if ".q_proj." in it]:
            parts = [found.pop(key.replace(".q_", f".{it}_")) for it in "qkv"]
            found[key.replace(".q_proj", ".qkv_proj")] = np.concatenate(parts)
        return found

    monkeypatch.setattr(gguf_files, "stacked", joined)
    monkeypatch.setitem(gguf_files.NAMES, "self_attn.qkv_proj", "attn_qkv")
    path = write(tmp_path / "model.gguf", GOLDENS / name)
    config, params, _ = load_hf(path)
    wanted, theirs, _ = load_hf(GOLDENS / name)
    assert (config, params_digest(params)) == (wanted, params_digest(theirs))
    architecture = {"glm": "chatglm"}.get(name, name)
    seven = {f"{architecture}.attention.head_count": 7}
    with refused(ModelError, "attn_qkv", "7 heads and twice 2"):
        load_config(write(path, GOLDENS / name, metadata=seven))
    for key, value in (("rope.dimension_count", 14), ("rope.dimension_sections", [2, 2, 2, 0])):
        with refused(ModelError, f"{architecture}.{key}"):
            load_config(write(path, GOLDENS / name, metadata={f"{architecture}.{key}": value}))


def test_a_dense_granite_4_is_a_granite(tmp_path):
    """llama.cpp's converter says so; one that does not rotate is refused by its switch."""
    path = write(tmp_path / "model.gguf", GOLDENS / "granite4")
    model = load_model(path, cache_tokens=256)
    assert model.config.family == "granite"
    with np.load(GOLDENS / "granite4" / "expected.npz") as golden:
        np.testing.assert_allclose(model.logits(golden["ids"]), golden["logits"], atol=1e-4)
    bare = {"granite.rope.scaling.finetuned": False}
    with refused(ModelError, "granite.rope.scaling.finetuned=False"):
        load_config(write(path, GOLDENS / "granite4", metadata=bare))


def test_quantised_experts_are_apart(random_params, tiny_config, tmp_path):
    experts = ExpertsConfig(3, 2, normalise=True)
    config = tiny_config(
        "qwen3_moe", model_dim=32, mlp_dim=64, num_heads=16, num_kv_heads=16,
        num_layers=1, experts=experts,
    )  # fmt: skip
    export_hf(tmp_path / "hf", random_params(config), config)
    path = write(tmp_path / "model.gguf", tmp_path / "hf", "Q8_0")
    ours, plain = (load_params(it, config).layers for it in (path, tmp_path / "hf"))
    for name in ("router", "gate", "up", "down"):
        one, other = np.asarray(getattr(ours, name)), np.asarray(getattr(plain, name))
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, atol=0.02)
        assert np.abs(one - other).max() > 0
    with refused(ModelError, "qwen3moe.expert_gating_func=2"):
        load_config(write(path, tmp_path / "hf", metadata={"qwen3moe.expert_gating_func": 2}))
    flat = write(path, GOLDENS / "qwen3", architecture="qwen3moe", metadata={
        "qwen3moe.expert_used_count": 2, "qwen3moe.expert_feed_forward_length": 37,
    })  # fmt: skip
    with refused(ConfigError, "experts=0"):
        load_config(flat)


def test_a_file_of_gpt_oss(random_params, tiny_config, tmp_path):
    """It says nothing of the clamp, and that layers have a window in turn is known."""
    experts = ExpertsConfig(3, 2, normalise=True, router_bias=True, clamp=(1.702, 7.0))
    yarn = YarnScaling(4.0, 32, 32.0, 1.0, 0.1 * math.log(4) + 1, truncate=False)
    rope = RopeConfig(100.0, 32, interleaved=False, scaling=yarn)
    config = tiny_config(
        "gpt_oss", model_dim=32, mlp_dim=64, head_dim=32, num_heads=2, num_kv_heads=1, num_layers=2,
        rope=rope, window_layers=(True, False), experts=experts,
    )  # fmt: skip
    params = random_params(config)
    export_hf(tmp_path / "hf", params, config)
    found, ours, _ = load_hf(write(tmp_path / "model.gguf", tmp_path / "hf"))
    assert found == load_config(tmp_path / "hf")
    assert params_digest(ours) == params_digest(params)
    usual = {"gpt-oss.rope.scaling.yarn_attn_factor": 0.1 * math.log(4) + 1}
    path = write(tmp_path / "model.gguf", tmp_path / "hf", "MXFP4", metadata=usual)
    ours, kind = load_params(path, config, dtype="float32").layers, GGMLQuantizationType.MXFP4
    for name in ("gate", "up", "down"):
        turned = np.asarray(getattr(params.layers, name)).swapaxes(2, 3)
        stored = gguf.quants.dequantize(gguf_files.stored(turned, "MXFP4"), kind)
        np.testing.assert_array_equal(getattr(ours, name), stored.swapaxes(2, 3), err_msg=name)
        bias = f"{name}_bias"
        np.testing.assert_array_equal(getattr(ours, bias), getattr(params.layers, bias))
    assert load_config(path) == dataclasses.replace(found, dtype="bfloat16")
    with refused(ModelError, "gpt-oss.rope.scaling.yarn_attn_factor=3.0", "1.138"):
        load_config(write(path, tmp_path / "hf", metadata=dict.fromkeys(usual, 3.0)))


def test_messages_of_gpt_oss_end_no_answer(tmp_path):
    words = byte_level("gpt-4o")
    ids = len(words["tokenizer.ggml.tokens"])
    words["tokenizer.ggml.tokens"] += ["<|end|>", "<|return|>", "<|call|>"]
    words["tokenizer.ggml.token_type"] += [3] * 3
    path = write(tmp_path / "a.gguf", GOLDENS / "llama", tokenizer=words)
    assert load_config(path).eos_ids == (2, 0, ids + 1, ids + 2)
    words["tokenizer.ggml.tokens"][-1] = "<|other|>"
    assert load_config(write(path, GOLDENS / "llama", tokenizer=words)).eos_ids == (2, 0, ids)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *QUANTISED])
def test_every_type_has_the_values_of_ggml(kind, wide, tmp_path):
    path = write(tmp_path / "model.gguf", wide, kind)
    folder = shutil.copytree(wide, tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    for key, values in tensors.items():
        heads = {"q_proj": 4, "k_proj": 2}.get(key.split(".")[-2])
        if values.ndim > 1:
            ordered = paired(values, heads) if heads else values
            made = gguf_files.stored(ordered, kind)
            made = gguf.quants.dequantize(made, GGMLQuantizationType[kind])
            halves = made.reshape(heads or 1, -1, 2, made.shape[1]).swapaxes(1, 2)
            tensors[key] = (halves.reshape(made.shape) if heads else made).copy()
    save_file(tensors, folder / "model.safetensors")
    ours, theirs = (load_params(it, load_config(it), dtype="float32") for it in (path, folder))
    assert params_digest(ours) == params_digest(theirs)
    assert load_config(path).dtype == ("float32" if kind == "F32" else "bfloat16")
    if kind in ("Q4_K", "Q8_0"):
        ids = np.arange(12)[None]
        one, other = (load_model(it, dtype="float32", cache_tokens=256) for it in (path, folder))
        np.testing.assert_array_equal(one.logits(ids), other.logits(ids))


def test_a_digest_is_of_the_bytes(wide, tmp_path):
    path = write(tmp_path / "model.gguf", wide, "Q4_0", metadata={"general.name": "one"})
    again = write(tmp_path / "again.gguf", wide, "Q4_0", metadata={"general.name": "another"})
    assert weights_digest(path) == weights_digest(again)
    assert weights_digest(path) != weights_digest(write(tmp_path / "five.gguf", wide, "Q5_0"))
    tensor = stored_tensors(again)["model.layers.0.mlp.up_proj.weight"]
    data = bytearray(again.read_bytes())
    data[tensor.start + 5] ^= 1
    again.write_bytes(data)
    assert weights_digest(path) != weights_digest(again)


@pytest.mark.parametrize("to", [None, "huggingface", "jaxrag"])
def test_it_converts(to, wide, tmp_path):
    path = write(tmp_path / "model.gguf", wide, "Q5_1", tokenizer=byte_level())
    assert convert(path, tmp_path / "made", to) == (to or "huggingface")
    ours, theirs = (load_model(it, cache_tokens=256) for it in (path, tmp_path / "made"))
    assert ours.config == theirs.config
    assert params_digest(ours.params) == params_digest(theirs.params)
    assert ours.tokenizer.digest == theirs.tokenizer.digest
    assert ours.tokenizer.render_chat(CHAT) == theirs.tokenizer.render_chat(CHAT)
    assert ours.eos_ids == theirs.eos_ids == {2, 0}


def byte_level_file(tmp_path, pre="smollm", **metadata):
    path = tmp_path / f"{pre}.gguf"
    return write(path, GOLDENS / "llama", tokenizer=byte_level(pre), metadata=metadata)


def pieces(tokenizer, text):
    return [tokenizer.decode([i], skip_special=False) for i in tokenizer.encode(text)]


def test_byte_level(tmp_path):
    tokenizer = Tokenizer.load(byte_level_file(tmp_path))
    assert pieces(tokenizer, "the the 12<|im_end|>")[:5] == ["the", " the", " ", "1", "2"]
    assert 2 not in tokenizer.encode("the<|im_end|>")
    assert tokenizer.encode("the<|im_end|>", special=True).tolist()[-1] == 2
    assert tokenizer.added_tokens == {
        "<|endoftext|>": True, "<|im_start|>": True, "<|im_end|>": True, "<tool>": False,
    }  # fmt: skip
    text = "\x00é 漢字\n\n🍕 \t it's ½"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.render_chat(CHAT) == "<|im_start|>the loa"
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.leading_ids.tolist()) == (1, (2,), [])


TEXT = "it's IT'S 12345 x\n\n ½é  y..\n"
QWEN2 = ["it", "'s", " IT", "'S", " ", *"12345", " x", "\n\n", " ", "½", "é", " ", " y", "..\n"]
GPT2 = ["it", "'s", " IT", "'", "S", " 12345", " x", "\n\n", " ½", "é", " ", " y", "..", "\n"]
SMOLLM = [
    "it",
    "'s",
    " IT",
    "'",
    "S",
    " ",
    *"12345",
    " x",
    "\n\n ",
    "½",
    "é",
    " ",
    " y",
    "..",
    "\n",
]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", GPT2),
        ("smollm", SMOLLM),
        ("qwen2", QWEN2),
        ("llama-bpe", [*QWEN2[:5], "123", "45", *QWEN2[10:]]),
        ("tekken", [*QWEN2[:3], "'S", *QWEN2[4:]]),
        ("gpt-4o", ["it's", " IT'S", " ", "123", "45", *QWEN2[10:]]),
        ("default", ["it", "'", "s", " IT", "'", "S", " ", "123", "45", " x", "\n\n", " ", "½", "é",
                     " ", " y", "..", "\n"]),
        ("deepseek-coder", ["it", "'", "s", " IT", "'", "S", " ", *"12345", " x", "\n", "\n", " ",
                            "½", "é", "  y"[:1], " y", "..", "\n"]),
    ],
)  # fmt: skip
def test_a_text_is_split_as_the_name_says(pre, expected, tmp_path):
    tokenizer = Tokenizer.load(byte_level_file(tmp_path, pre))
    split = tokenizer._text.pre_tokenizer.pre_tokenize_str(TEXT)
    assert [TEXT[start:end] for _, (start, end) in split] == expected


def test_every_pattern_is_one(tmp_path):
    for pre in PATTERNS:
        tokenizer = Tokenizer.load(byte_level_file(tmp_path, pre))
        assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
        whole = pre in ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")
        assert tokenizer.leading_ids.tolist() == [1] * whole
        assert pieces(tokenizer, "loa") == (["loa"] if whole else ["lo", "a"])


def reference(vocabulary, text):
    """SentencePiece's BPE as llama.cpp has it: the best pair first, of equals the left one."""
    ids = {token: i for i, token in enumerate(vocabulary["tokenizer.ggml.tokens"])}
    scores = vocabulary["tokenizer.ggml.scores"]
    parts = list("\u2581" + text.replace(" ", "\u2581"))
    while True:
        found = [
            (-scores[ids[a + b]], at)
            for at, (a, b) in enumerate(itertools.pairwise(parts))
            if a + b in ids and ids[a + b] > 259
        ]
        if not found:
            break
        at = min(found)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    known = [[ids[it]] if it in ids else [ids[f"<0x{b:02X}>"] for b in it.encode()] for it in parts]
    return [i for some in known for i in some]


def test_sentence_pieces(tmp_path):
    vocabulary = sentence_pieces()
    path = write(tmp_path / "model.gguf", GOLDENS / "llama", tokenizer=vocabulary)
    tokenizer = Tokenizer.load(path)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.leading_ids.tolist()) == (1, (2,), [1])
    assert load_config(path).eos_ids == (2, 3)
    rng = np.random.default_rng(0)
    words = ["the", "river", "is", "copper", "  ", "singing", "é", "漢", "\n", "<s>", "herring."]
    for _ in range(200):
        text = "".join(f"{word} "[: rng.integers(1, 9)] for word in rng.choice(words, 8))
        ids = tokenizer.encode(text).tolist()
        assert ids == reference(vocabulary, text)
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("a<s>a", special=True).tolist() == [
        *reference(vocabulary, "a"), 1, *reference(vocabulary, "a"),
    ]  # fmt: skip


def test_sentence_pieces_without_a_space_or_bos(tmp_path):
    said = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    path = tmp_path / "model.gguf"
    write(path, GOLDENS / "llama", tokenizer=sentence_pieces(), metadata=said)
    tokenizer = Tokenizer.load(path)
    assert tokenizer.leading_ids.tolist() == []
    assert pieces(tokenizer, "river") == ["r", "i", "v", "er"]
    assert tokenizer.decode(tokenizer.encode(" river")) == " river"


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"general.architecture": "gemma4"}, ("'gemma4'", "llama, mistral, qwen2, qwen3")),
        ({"split.count": 3}, ("one of 3 parts", "llama-gguf-split --merge")),
        ({"general.type": "adapter"}, ("'adapter'",)),
        ({"llama.expert_count": 8}, ("llama.expert_used_count",)),
        ({"llama.attention.scale": 0.5}, ("llama.attention.scale=0.5",)),
        ({"llama.rope.scaling.type": "longrope"}, ("longrope", "yarn")),
        ({"llama.rope.dimension_count": 4}, ("llama.rope.dimension_count=4", "expected 10")),
        ({"llama.attention.head_count": 0}, ("llama.attention.head_count=0",)),
        ({"llama.attention.head_count": [6, 6]}, ("llama.attention.head_count", "array")),
        ({"llama.attention.head_count": "6"}, ("llama.attention.head_count", "'6'")),
        ({"llama.attention.head_count": 7}, ("7 heads",)),
        ({"llama.block_count": 2**31 - 1}, ("num_hidden_layers=2147483647", "expected at most")),
        ({"llama.embedding_length": 48}, ("shape [53, 24]",)),
        ({"general.alignment": 12}, ("general.alignment=12",)),
        ({"llama.nested": [[1, 2], [3]]}, ("an array of arrays",)),
        ({"tokenizer.ggml.pre": "gemma4"}, ("'gemma4'", "smollm")),
        ({"tokenizer.ggml.model": "t5"}, ("'t5'", "'gpt2'")),
        ({"tokenizer.ggml.bos_token_id": 10**6}, ("bos_token_id=1000000",)),
        (
            {"tokenizer.ggml.tokens": ["a", "b", "a"], "tokenizer.ggml.token_type": [1] * 3},
            ("'a'",),
        ),
        ({"tokenizer.ggml.token_type": [1, 1]}, ("2 kinds",)),
        ({"tokenizer.ggml.merges": ["q zz"]}, ("not a readable tokenizer",)),
    ],
    ids=lambda it: next(iter(it)) if isinstance(it, dict) else "",
)
def test_what_is_not_read_is_said(metadata, named, tmp_path):
    path = write(tmp_path / "a.gguf", GOLDENS / "llama", tokenizer=byte_level(), metadata=metadata)
    with refused((ModelError, ConfigError, TokenizerError), path, *named):
        load_hf(path)


def test_factors_that_are_not_llama_3s(tmp_path):
    with refused(ModelError, "rope_freqs.weight", "low_freq_factor=1"):
        said = {"llama.rope.scaling.original_context_length": 64}
        load_config(write(tmp_path / "a.gguf", GOLDENS / "llama_llama3", metadata=said))


def test_types_that_are_not_read(wide, tmp_path, monkeypatch):
    path = write(tmp_path / "a.gguf", wide, "Q4_0")
    data = bytearray(path.read_bytes())
    at = data.find(b"blk.0.attn_v.weight") + len("blk.0.attn_v.weight") + 4 + 16
    data[at : at + 4] = struct.pack("<I", GGMLQuantizationType.IQ4_XS)
    path.write_bytes(data)
    with refused(ModelError, "'blk.0.attn_v.weight' is of the type IQ4_XS", "Q6_K"):
        load_config(path)


def test_tensors_that_share_bytes(tmp_path):
    path = write(tmp_path / "a.gguf", GOLDENS / "llama")
    data = bytearray(path.read_bytes())
    at = data.find(b"output_norm.weight") + len("output_norm.weight") + 4 + 8 + 4
    data[at : at + 8] = bytes(8)
    path.write_bytes(data)
    with refused(ModelError, "does not lie whole and apart"):
        load_config(path)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "no GGUF file"),
        (b"\x8a\x00\x00\x00\x00\x00\x00\x00{}", "no GGUF file"),
        (b"GGUF" + struct.pack("<I", 1), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 1), f"{2**63} tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 9), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**40), f"{2**40} bytes"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 8, 2**61), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQQ", 3, 0, 1, 1, b"a", 9, 8, 1, 2**64 - 1), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 12, 2**61), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ1sIQ1s", 3, 0, 1, 1, b"a", 8, 1, b"\xff"), "no UTF-8"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"a", 77), "of type 77"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + struct.pack("<Q1sIB", 1, b"a", 0, 1) * 2,
            "twice",
        ),
    ],
    ids=lambda it: it if isinstance(it, str) else "",
)
def test_headers_that_nobody_wrote(data, named, tmp_path):
    (tmp_path / "a.gguf").write_bytes(data)
    with refused(ModelError, named):
        read_header(tmp_path / "a.gguf")


def test_pieces_that_are_made_of_each_other_in_too_many_ways(tmp_path):
    vocabulary = sentence_pieces()
    tokens = [*vocabulary["tokenizer.ggml.tokens"], *("e" * n for n in range(2, 700))]
    said = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": [0.0] * len(tokens),
            "tokenizer.ggml.token_type": [1] * len(tokens)}  # fmt: skip
    path = tmp_path / "a.gguf"
    write(path, GOLDENS / "llama", tokenizer=vocabulary, metadata=said)
    with refused(TokenizerError, "more ways"):
        Tokenizer.load(path)


def test_mutated_files_load_or_end_in_one_line(tmp_path):
    ends = gguf_files.fuzz(tmp_path, 80, seed=1)
    assert ends.pop("") > 0
    assert ends.pop("refused") > 40
    assert not ends


@pytest.mark.slow
def test_many_mutated_files(tmp_path):
    assert gguf_files.fuzz(tmp_path, 2000, seed=2).keys() == {"", "refused"}


def test_what_is_said_of_files(tmp_path, capsys):
    path = byte_level_file(tmp_path)
    assert not is_hub_name("models/model.gguf")
    with refused(ModelError, "name the GGUF file to load", path):
        load_config(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    with refused(ModelError, "a model is a GGUF file"):
        load_model(tmp_path / "model.safetensors")
    wide = tmp_path / "wide.gguf"
    directory = shutil.copytree(GOLDENS / "llama", tmp_path / "large")
    tensors = load_file(directory / "model.safetensors")
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[key] = np.resize(tensors[key], (300, tensors[key].shape[1]))
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    write(wide, directory, tokenizer=byte_level())
    assert main(["check", str(wide), "--quick"]) == 0
    said = capsys.readouterr().out
    assert "GGUF file, 1 with" in said
    assert "<|im_end|> (2)" in said
