"""GGUF files made of Hugging Face directories, and files that nobody should load.

    python tests/faults/gguf_files.py [COUNT]

mutates a small file COUNT times (2,000), and says what does not end in one line, or takes more
memory than a few times the file. Run from the root of the project.
"""

import collections
import dataclasses
import json
import math
import random
import resource
import struct
import sys
import tempfile
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

from jaxrag.base.errors import JaxragError
from jaxrag.base.rotary import frequencies
from jaxrag.models.digest import weights_digest
from jaxrag.models.hf import find_sources, load_config, load_params
from jaxrag.models.tensor_files import read_tensors
from jaxrag.models.text.tokenizer import Tokenizer

GOLDENS = Path(__file__).parents[1] / "goldens"
MEMORY = 64 << 20  # beside a few times the file
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    **{f"mlp.experts.{it}_proj": f"ffn_{it}_exps" for it in ("gate", "up", "down")},
    "block_sparse_moe.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp",
    **{f"block_sparse_moe.experts.w{at}": f"ffn_{it}_exps"
       for at, it in zip((1, 3, 2), ("gate", "up", "down"), strict=True)},
    "self_attn.sinks": "attn_sinks", "mlp.gate_up_proj": "ffn_up",
    "shared_mlp.output_linear": "ffn_down",
}  # fmt: skip
GEMMA_NAMES = {
    "pre_feedforward_layernorm": "ffn_norm", "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
GLM_NAMES = {
    "post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm",
}  # fmt: skip

GRANITE = {
    "embedding_scale": "embedding_multiplier", "attention.scale": "attention_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip


def paired(rows, heads):
    """Rows of q and k as llama.cpp's converter orders them."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def blocks(shape, kind, seed=0):
    """Random blocks of a type that gguf cannot make, with scales of which none is huge."""
    count, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    made = rng.integers(0, 256, (math.prod(shape) // count, size), np.uint8)
    for at in {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (size - 2,)}[kind]:
        scale = rng.uniform(1e-4, 3e-4, len(made)).astype(np.float16)
        made[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    return made.reshape(*shape[:-1], -1)


def stored(values, kind):
    """The array that GGUFWriter takes for values in a type."""
    if kind in ("F32", "F16"):
        return values.astype({"F32": np.float32, "F16": np.float16}[kind])
    if kind.endswith("_K"):
        return blocks(values.shape, kind)
    return gguf.quants.quantize(
        np.ascontiguousarray(values, np.float32), GGMLQuantizationType[kind]
    )


def write(path, directory, kind="F32", *, architecture=None, metadata=(), tokenizer=None):
    """A Hugging Face directory as a GGUF file; ``metadata`` is keys that are added or changed."""
    hf, config = json.loads((directory / "config.json").read_text()), load_config(directory)
    names = {"mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe", "olmo3": "olmo2",
             "gpt_oss": "gpt-oss", "granite4": "granite", "glm": "chatglm"}  # fmt: skip
    name = architecture or names.get(config.family, config.family)
    writer = GGUFWriter(path, name)
    values = {
        "block_count": config.num_layers, "context_length": config.max_positions,
        "embedding_length": config.model_dim, "feed_forward_length": config.mlp_dim,
        "attention.head_count": config.num_heads, "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps, "rope.freq_base": config.rope.theta,
        "rope.dimension_count": config.rope.rotary_dim,
    }  # fmt: skip
    if name == "granite":
        values |= {key: hf[it] for key, it in GRANITE.items()}
    if name == "gemma2":
        caps = "attn_logit_softcapping", "final_logit_softcapping"
        values |= {key: float(hf[key] or 0) for key in caps}
    if config.sliding_window:
        values["attention.sliding_window"] = config.sliding_window
    if config.experts is not None:
        values |= {
            "expert_count": config.experts.count, "expert_used_count": config.experts.active,
            "expert_feed_forward_length": config.mlp_dim,
        }  # fmt: skip
    rope = hf["rope_parameters"]
    rope = rope.get("full_attention", rope)
    if rope["rope_type"] in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
        values |= {
            f"rope.scaling.yarn_{it}": rope[it] for it in ("beta_fast", "beta_slow") if it in rope
        }
    if "original_max_position_embeddings" in rope:
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if rope["rope_type"] == "llama3":
        plain = dataclasses.replace(config.rope, scaling=None)
        factors = frequencies(plain) / frequencies(config.rope)
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    values = {f"{name}.{key}": value for key, value in values.items()}
    values |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    if name in ("glm4", "chatglm"):
        values["tokenizer.ggml.eot_token_id"] = config.eos_ids[1]
    if config.family == "olmo3":
        said = [it == "sliding_attention" for it in hf["layer_types"]]
        if said != [(layer + 1) % 4 > 0 for layer in range(config.num_layers)]:
            values["olmo2.attention.sliding_window_pattern"] = said
    for key, value in {**values, **(tokenizer or {}), **dict(metadata)}.items():
        put(writer, key, value)
    for key, view in stacked(directory).items():
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(key.split(".")[-2])
        if heads and name in ("llama", "mistral", "granite", "smollm3"):
            view = paired(view, heads)
        if name in ("gemma2", "gemma3") and key.endswith("norm.weight"):
            view = view + 1
        one = kind if view.ndim > 1 and not key.endswith("bias") else "F32"
        writer.add_tensor(entry(key, name), stored(view, one), raw_dtype=GGMLQuantizationType[one])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stacked(directory):
    """The tensors of a directory in float32, those of all experts as one."""
    found, experts = {}, {}
    for key, tensor in sorted(read_tensors(directory).items()):
        view, parts = np.asarray(tensor.view(), np.float32), key.split(".experts.")
        if len(parts) == 1 or not parts[1][0].isdigit():
            found[key] = view
        else:
            number, rest = parts[1].split(".", 1)
            experts.setdefault(f"{parts[0]}.experts.{rest}", {})[int(number)] = view
    for key, each in experts.items():
        found[key] = np.stack([each[number] for number in range(len(each))])
    for key in [it for it in found if it.endswith("shared_mlp.input_linear.weight")]:
        gate, up = np.split(found.pop(key), 2)
        layer = key.removesuffix("shared_mlp.input_linear.weight")
        found |= {f"{layer}mlp.gate_proj.weight": gate, f"{layer}mlp.up_proj.weight": up}
    for key in [it for it in found if it.rsplit(".", 1)[-1].startswith(("gate_up_", "down_"))]:
        found |= of_gpt_oss(key, found.pop(key))
    return found


def of_gpt_oss(key, values):
    """Its experts' tensors [E, in, out] as llama.cpp's converter parts and turns them."""
    stem, last = key.rsplit(".", 1)
    end = "bias" if last.endswith("_bias") else "weight"
    if last.startswith("down"):
        parts = {"down": values}
    else:
        parts = {"gate": values[..., ::2], "up": values[..., 1::2]}
    return {
        f"{stem}.{name}_proj.{end}": it if end == "bias" else it.swapaxes(1, 2)
        for name, it in parts.items()
    }


def put(writer, key, value):
    """A key by the type of its value."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def entry(key, architecture):
    """The name of a tensor in the file."""
    names = NAMES | (GEMMA_NAMES if architecture in ("gemma2", "gemma3", "olmo2") else {})
    names |= GLM_NAMES if architecture == "glm4" else {}
    if architecture == "gpt-oss":
        names = {**names, "post_attention_layernorm": "post_attention_norm"}
    key = f"{key}.weight" if key.endswith(".sinks") else key
    *layer, last = key.removeprefix("model.layers.").split(".", 1) if ".layers." in key else [key]
    stem, end = last.rsplit(".", 1)
    return ".".join([*(["blk"] if layer else []), *layer, names[stem], end])


def sentence_pieces():
    """A small vocabulary of the kind of SentencePiece."""
    words = [
        "\u2581the",
        "\u2581river",
        "\u2581is",
        "\u2581copper",
        "\u2581a",
        "\u2581\u2581",
        "ing",
    ]
    pieces = dict.fromkeys(word[:at] for word in words for at in range(2, len(word) + 1))
    letters = sorted({c for word in words for c in word} | set("bcdfjklmquwxyz.,"))
    joined = [*pieces, "er", "th", "he"]
    tokens = ["<unk>", "<s>", "</s>", "<|eot_id|>", *(f"<0x{i:02X}>" for i in range(256))]
    kinds = [2, 3, 3, 3, *[6] * 256, *[1] * (len(joined) + len(letters))]
    scores = (
        [0.0] * 260
        + [-float(i) for i in range(len(joined))]
        + [-1e3 - i for i in range(len(letters))]
    )
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*tokens, *joined, *letters],
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def byte_level(pre="smollm"):
    """A small vocabulary of bytes and a few merges."""
    from tokenizers.pre_tokenizers import ByteLevel

    merges = ["t h", "th e", "\u0120 the", "i s", "l o", "1 2"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet())]
    tokens += [merge.replace(" ", "") for merge in merges] + ["loa", "<tool>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 4) + [4],
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}",
    }


EXTREME = (0, 1, 2**15, 2**31 - 1, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)


def mutated(data, rng):
    """A file with one to three things wrong, mostly in its header."""
    made = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        header = min(len(made), 1 << 14 if rng.random() < 0.8 else len(made))
        at = rng.randrange(max(1, header - 8))
        match rng.randrange(7):
            case 0:
                made[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                made[at : at + 8] = struct.pack("<Q", rng.choice(EXTREME))
            case 2:
                made[at : at + 4] = struct.pack("<I", rng.choice(EXTREME) & 0xFFFFFFFF)
            case 3:
                del made[at : at + rng.randint(1, 64)]
            case 4:
                made[at:at] = rng.randbytes(rng.randint(1, 64))
            case 5:
                del made[rng.randrange(len(made)) :]
            case _:  # a count, a type or a size at its very place
                known = [made.find(b"\x00" * 3, at), made.find(b".", at), 8, 16]
                place = max(0, rng.choice(known)) + rng.randint(0, 8)
                made[place : place + 4] = struct.pack("<I", rng.choice((8, 9, 12, 30, 2**31)))
        made = made or bytearray(b"GGUF")
    return bytes(made)


def trial(path):
    """How a file ends: "" loaded, "refused", or what is wrong; and the bytes that it took."""
    tracemalloc.start()
    try:
        config = load_config(path)
        find_sources(path, config)
        weights_digest(path)
        found = Tokenizer.find(path)
        if found is not None:
            found.encode("The river is copper: 1234.")
        load_params(path, config, dtype="float32")
        verdict = ""
    except JaxragError as error:
        said = str(error)
        verdict = (
            "refused" if said.isprintable() and len(said) < 1000 else f"message: {said!r:.200}"
        )
    except BaseException as error:
        verdict = f"{type(error).__name__}: {error}"
        if isinstance(error, KeyboardInterrupt):
            raise
    finally:
        taken = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return verdict, taken


def fuzz(folder, count, seed=0):
    """How ``count`` mutations end, counted; what is wrong stands with the number of its file."""
    wholes = [
        write(folder / "bpe.gguf", GOLDENS / "llama", tokenizer=byte_level()),
        write(folder / "spm.gguf", GOLDENS / "qwen2", tokenizer=sentence_pieces()),
    ]
    data = [whole.read_bytes() for whole in wholes]
    ends = collections.Counter()
    for number in range(count):
        path = folder / "mutated.gguf"
        path.write_bytes(mutated(data[number % 2], random.Random(seed * 1_000_003 + number)))
        verdict, taken = trial(path)
        if taken > MEMORY + 16 * path.stat().st_size:
            verdict = f"{taken} bytes"
        ends[verdict if verdict in ("", "refused") else f"{number}: {verdict}"] += 1
    return ends


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        fuzz(Path(place), 20)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        ended = fuzz(Path(place), int((sys.argv[1:] or [2000])[0]))
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"loaded {ended.pop('', 0)}, refused {ended.pop('refused', 0)}, {grown >> 10} MiB more")
    for wrong in ended:
        print(wrong)
    sys.exit(bool(ended) or grown > 256 << 10)
