"""The llama.cpp side of other scripts here; run by the peer's own interpreter.

Imports llama_cpp, gguf and NumPy and nothing of jaxrag. Reads one JSON line per measurement from
stdin, {"ids": [...], "rows": B, "tokens": n}, and answers {"seconds": s, "ids": [...]}: n decode
steps of B sequences, greedy, behind the same prompt; the ids of the first of them, from that which
follows the prompt. The prompt is run once and its KV copied to every sequence; neither is timed.
Weights and KV are in the dtype of the command line, on all cores, nothing on a GPU; "int8" are
weights of float32 as Q8_0, beside KV in float32. A GGUF file is taken as it is, with KV in float16;
a last argument of 0 is without flash attention, which is otherwise where llama.cpp puts it.
"""

import ctypes
import json
import mmap
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

BATCH = 512  # tokens of the prompt that are run at once
_KIND = gguf.GGMLQuantizationType
TYPES = {
    "float32": _KIND.F32,
    "bfloat16": _KIND.BF16,
    "float16": _KIND.F16,
    "int8": _KIND.Q8_0,
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tensors(directory: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Names and values of all safetensors; bfloat16 as its 16 bits, uint16."""
    kinds = {"F32": np.float32, "BF16": np.uint16}
    for path in sorted(directory.glob("*.safetensors")):
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        length = int.from_bytes(mapped[:8], "little")
        for name, it in json.loads(mapped[8 : 8 + length]).items():
            if name == "__metadata__":
                continue
            kind, (start, end) = np.dtype(kinds[it["dtype"]]), it["data_offsets"]
            count = (end - start) // kind.itemsize
            values = np.frombuffer(mapped, kind, count, 8 + length + start)
            yield name, values.reshape(it["shape"])


def convert(directory: Path, dtype: str, target: Path) -> None:
    """Write a Llama in Hugging Face's format as GGUF, its matrices as they are."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    rope = config["rope_parameters"]
    if (
        config["model_type"] != "llama"
        or rope["rope_type"] != "default"
        or config.get("attention_bias")
        or config.get("mlp_bias")
    ):
        sys.exit(f"{directory}: only a Llama without biases and scaled RoPE is converted to GGUF")
    heads, head_dim = config["num_attention_heads"], config["head_dim"]
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    for name, values in tensors(directory):
        short = gguf_name(name)
        if values.ndim == 1:  # norms are float32 there, whatever the matrices are
            writer.add_tensor(short, as_float32(values))
            continue
        if (values.dtype == np.float32) != (dtype != "bfloat16"):
            sys.exit(f"{directory}: {name} is not in {dtype}")
        if "q_proj" in name or "k_proj" in name:
            values = interleave(values, head_dim)
        kind, raw = TYPES[dtype], np.ascontiguousarray(values)
        raw = gguf.quantize(raw, kind) if dtype == "int8" else raw.view(np.uint8)
        writer.add_tensor(short, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """A tensor's name in a GGUF of a Llama."""
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        layer, _, rest = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{NAMES[rest]}.weight"
    return f"{NAMES[stem]}.weight"


def as_float32(values: np.ndarray) -> np.ndarray:
    """The values of float32, or of bfloat16 as 16 bits."""
    if values.dtype == np.float32:
        return values
    return (values.astype(np.uint32) << 16).view(np.float32)


def interleave(values: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of q or k [heads * H, D], so that the two of a rotated pair, H/2 apart, are neighbours.

    GGUF's Llama rotates dimensions (0, 1), (2, 3), ...; Hugging Face's (0, H/2), (1, H/2+1), ...
    """
    order = np.arange(head_dim).reshape(2, head_dim // 2).T.ravel()
    split = values.reshape(-1, head_dim, values.shape[1])
    return split[:, order].reshape(values.shape)


class Sequences:
    """B sequences behind the same prompt, which decode from there as often as asked."""

    flash = -1  # attention: 0 without, -1 as it comes

    def __init__(self, model: Any, dtype: str, ids: Sequence[int], rows: int, tokens: int) -> None:
        self.asked = (list(ids), rows, tokens)
        self.ids, self.rows = ids, rows
        cores = len(os.sched_getaffinity(0))
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = rows * -(-(len(ids) + tokens) // 256) * 256
        settings.n_batch = settings.n_ubatch = max(BATCH, rows)
        settings.n_seq_max = rows
        settings.flash_attn_type = self.flash
        settings.kv_unified = False  # every sequence has KV of its own
        settings.n_threads = settings.n_threads_batch = cores
        settings.type_k = settings.type_v = int(TYPES["float32" if dtype == "int8" else dtype])
        self._context = llama_cpp.llama_init_from_model(model, settings)
        if not self._context:
            raise MemoryError(f"llama.cpp has no room for {rows} sequences of {len(ids)} tokens")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(max(BATCH, rows), 0, 1)
        for start in range(0, len(ids), BATCH):
            part = ids[start : start + BATCH]
            self._run([(token, start + at, 0) for at, token in enumerate(part)], every=False)
        self._first = int(self._logits(len(part) - 1).argmax())
        for row in range(1, rows):
            llama_cpp.llama_memory_seq_cp(self._memory, 0, row, 0, -1)

    def decode(self, tokens: int) -> dict[str, Any]:
        """Every sequence generates so many tokens, from the prompt on."""
        at = len(self.ids)
        for row in range(self.rows):
            llama_cpp.llama_memory_seq_rm(self._memory, row, at, -1)
        newest, first = [self._first] * self.rows, [self._first]
        start = time.perf_counter()
        for step in range(tokens):
            self._run([(token, at + step, row) for row, token in enumerate(newest)], every=True)
            newest = [int(self._logits(row).argmax()) for row in range(self.rows)]
            first.append(newest[0])
        return {"seconds": time.perf_counter() - start, "ids": first}

    def close(self) -> None:
        """Free its memory."""
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)

    def _run(self, tokens: Sequence[tuple[int, int, int]], every: bool) -> None:
        """Run tokens, each with its position and sequence; logits of the last, or of every one."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, (token, position, row) in enumerate(tokens):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = row
            batch.logits[index] = every or index == len(tokens) - 1
        failed = llama_cpp.llama_decode(self._context, batch)
        if failed:
            raise RuntimeError(f"llama_decode: {failed}")

    def _logits(self, index: int) -> np.ndarray:
        pointer = llama_cpp.llama_get_logits_ith(self._context, index)
        return np.ctypeslib.as_array(pointer, (self._vocab,))


def load(path: Path) -> Any:
    """The model of a GGUF, on the CPU."""
    settings = llama_cpp.llama_model_default_params()
    settings.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
    if not model:
        sys.exit(f"llama.cpp cannot load {path}")
    return model


@llama_cpp.llama_log_callback
def log(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    """Warnings and errors only; stdout is for answers."""
    if level in (3, 4):
        sys.stderr.write(text.decode(errors="replace"))


def main() -> None:
    """Convert the model named on the command line and answer until stdin closes."""
    directory, dtype, target, *flash = sys.argv[1:]
    Sequences.flash = int(*flash) if flash else -1
    llama_cpp.llama_log_set(log, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    if Path(directory).is_dir():
        convert(Path(directory), dtype, Path(target))
    model = load(Path(target))
    hello: Mapping[str, Any] = {
        "llama_cpp": llama_cpp.__version__,
        "system": llama_cpp.llama_print_system_info().decode(),
        "threads": len(os.sched_getaffinity(0)),
        "device": "cpu",
    }
    print(json.dumps(hello), flush=True)
    sequences = None
    for line in sys.stdin:
        asked = json.loads(line)
        shape = (asked["ids"], asked["rows"], asked["tokens"])
        if sequences is None or sequences.asked != shape:
            if sequences is not None:
                sequences.close()
            sequences = Sequences(model, dtype, *shape)
        print(json.dumps(sequences.decode(asked["tokens"])), flush=True)


if __name__ == "__main__":
    main()
