"""Models that llama.cpp reads and decodes: what is ours of them, without their weights."""

import dataclasses
import importlib.metadata
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np

from jaxrag.base.config import ModelConfig, RopeConfig
from jaxrag.base.errors import ConfigError, ModelError, RequestError
from jaxrag.base.gguf import Header, is_gguf, read_header
from jaxrag.base.installed import installs
from jaxrag.base.llama_cpp.client import LlamaCpp, LlamaCppOptions
from jaxrag.base.types import HostArray, TokenRun
from jaxrag.kv.store.layout import KVLayout
from jaxrag.models.backend import ROWS, check_length
from jaxrag.models.text.gguf import ending_ids

KVKind = Literal["f16", "q8_0", "q4_0"]
ENGINES: dict[str, KVKind] = {
    "llama_cpp": "f16",
    "llama_cpp:q8_0": "q8_0",
    "llama_cpp:q4_0": "q4_0",
}  # and the type of KV that each keeps
_BLOCKS = {"q8_0": (32, 34), "q4_0": (32, 18)}  # values and bytes of a block
_MOST_CELLS = 8192  # tokens of KV by default, of all requests together
MOST_READ = 2048  # tokens of a chunk and what it is read behind


class Elsewhere:
    """In the place of the weights: whoever asks for them is told where they are."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RequestError(
            "this model is read and decoded by llama.cpp, which does no such thing; load it "
            "without engine='llama_cpp'"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class LlamaCppBackend:
    """llama.cpp with the weights of one model.

    Attributes:
      engine: its name, of ENGINES.
      process: that has them.
      layout: of the chunks that it reads: K as it was rotated behind what it was read behind, and
        V, in its own order of dimensions. f16, or bytes of its blocks.
      leading: int32, what chunks are read behind that would be read alone, as the model wants a
        beginning; may be empty.
      cells: tokens of KV for all requests together.
      version: of llama-cpp-python.
    """

    engine: str
    process: LlamaCpp
    layout: KVLayout
    leading: HostArray
    cells: int
    version: str

    called = "engine='llama_cpp'"

    @property
    def most_read(self) -> int:
        """Tokens of a chunk, with what it is read behind."""
        return MOST_READ

    @property
    def identity(self) -> dict[str, str]:
        """What shapes its KV beside weights and tokens."""
        return {"llama_cpp": self.version, "kv": ENGINES[self.engine]}

    def before(self, prefix: HostArray, ids: HostArray) -> HostArray:
        """What a chunk is read behind, int32: prefix and primer, else the beginning if need be."""
        begins = np.array_equal(ids[: len(self.leading)], self.leading)
        return prefix if len(prefix) or begins else self.leading

    def encode(
        self, prefix: HostArray, chunks: Sequence[HostArray]
    ) -> Iterator[tuple[int, HostArray]]:
        """As ``encode_chunks``: yields (index, KV of ``layout``) of chunks behind one prefix.

        Raises RequestError for a chunk that is too long to be read, EngineError where llama.cpp
        fails.
        """
        for index, ids in enumerate(chunks):
            before = self.before(prefix, ids)
            check_length(self, len(before), len(ids))
            kv = self.process.encode(before, ids)
            shape = self.layout.shape(len(ids))
            yield index, kv.view(self.layout.numpy_dtype).reshape(shape)

    def restore(self, row: int, kv: HostArray, first: int, place: int, life: int) -> None:
        """Put KV [L, 2, T, K, H] that was read behind ``first`` tokens to ``place`` of a row."""
        bytes_of = np.ascontiguousarray(kv).view(np.uint8)
        self.process.restore(row, bytes_of.reshape(*kv.shape[:3], -1), first, place, life)

    def live(self) -> int:
        """As ``LlamaCpp.live``."""
        return self.process.live()

    def step(self, runs: Sequence[TokenRun], life: int) -> HostArray:
        """As ``LlamaCpp.step``."""
        return self.process.step(runs, life)

    def leave(self, row: int) -> None:
        """As ``LlamaCpp.leave``."""
        self.process.leave(row)


def open_llama_cpp(
    path: Path, engine: str, cache_tokens: int | None, leading: HostArray
) -> tuple[LlamaCppBackend, ModelConfig]:
    """llama.cpp with a GGUF file, and what its metadata says of the model; no weight is read.

    Args:
      engine: one of ENGINES.
      cache_tokens: of KV for all requests together; None: one context, at most 8,192.
      leading: as of ``LlamaCppBackend``.

    Raises ModelError for another file, for a model whose layers keep KV of different sizes, and
    where llama-cpp-python is not installed.
    """
    kind = ENGINES[engine]
    try:
        version = importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(
            f"engine={engine!r}: llama-cpp-python is not installed; {installs('llama-cpp')} does it"
        ) from None
    if not is_gguf(path):
        raise ModelError(f"{path}: engine='llama_cpp' takes a GGUF file")
    header = read_header(path)
    config = _config(header)
    layout = _layout(config, kind)
    cells = cache_tokens or min(config.max_positions, _MOST_CELLS)
    reading = min(config.max_positions, MOST_READ)
    asked = LlamaCppOptions(
        path=str(path),
        kv=kind,
        cells=cells + reading,
        rows=ROWS,
        threads=len(os.sched_getaffinity(0)),
    )
    row = layout.nbytes(1) // (2 * layout.num_layers)
    process = LlamaCpp(asked, layout.num_layers, row, config.vocab_size)
    return LlamaCppBackend(engine, process, layout, leading, cells, version), config


def _config(header: Header) -> ModelConfig:
    """Sizes and ends; what else the model computes is llama.cpp's to know."""
    architecture = header.text("general.architecture", "") or ""

    def size(key: str, default: int | None = None) -> int:
        value: Any = header.number(f"{architecture}.{key}", default)
        if type(value) is not int or not 0 < value < 1 << 31:
            raise ModelError(f"{header.path}: {architecture}.{key}={value!r:.80}: expected a size")
        return value

    heads, width = size("attention.head_count"), size("embedding_length")
    head_dim = size("attention.key_length", width // heads)
    if size("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{header.path}: K and V of different sizes are not kept")
    bos = header.number("tokenizer.ggml.bos_token_id", -1)
    embed = header.tensors.get("token_embd.weight")
    return ModelConfig(
        family="llama",  # whatever it is: no table of ours is asked about it
        vocab_size=0 if embed is None else embed.shape[0],
        num_layers=size("block_count"),
        model_dim=width,
        mlp_dim=size("feed_forward_length", width),
        num_heads=heads,
        num_kv_heads=size("attention.head_count_kv", heads),
        head_dim=head_dim,
        norm_eps=1e-6,
        rope=RopeConfig(10_000.0, head_dim, interleaved=False, scaling=None),
        max_positions=size("context_length"),
        sliding_window=None,
        window_layers=None,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        post_norms=False,
        tie_embeddings=True,
        dtype="float16",
        bos_id=None if bos == -1 else int(bos),
        eos_ids=tuple(ending_ids(header)),
    )


def _layout(config: ModelConfig, kind: KVKind) -> KVLayout:
    if kind == "f16":
        return KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, "float16")
    values, nbytes = _BLOCKS[kind]
    row = config.num_kv_heads * config.head_dim
    if row % values:
        raise ConfigError(f"{kind}: {row} values of K are no blocks of {values}; keep f16")
    return KVLayout(config.num_layers, 1, row // values * nbytes, "uint8")
