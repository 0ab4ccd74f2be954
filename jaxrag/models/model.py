"""A loaded model: weights, config, tokenizer, prompt template, and the mesh they lie on."""

import copy
import dataclasses
import functools
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrag.base.config import DecodeWeights, DType, Kernels, ModelConfig, config_to_dict
from jaxrag.base.errors import ConfigError, RequestError, TokenizerError
from jaxrag.base.gguf import is_gguf
from jaxrag.base.guide import Guide
from jaxrag.base.shapes import bucket
from jaxrag.base.sharding import Rules, exchange, put, replicated
from jaxrag.base.types import EMPTY, FINAL, Array, HostArray, Tokens
from jaxrag.kv.cache.host import to_device
from jaxrag.kv.placement import ON_DEVICE, KVHome, KVPlacement
from jaxrag.kv.store.base import KVStore
from jaxrag.kv.store.keys import fingerprint
from jaxrag.kv.store.layout import HeadShare, KVLayout
from jaxrag.models.attention import PackedAttend, check_kernels, measured_kernels
from jaxrag.models.backend import RowBackend
from jaxrag.models.checkpoint import is_checkpoint, load_checkpoint
from jaxrag.models.compiled import keep_compiled
from jaxrag.models.decoder import Decoder, forward, unembed
from jaxrag.models.digest import file_digest, params_digest, weights_digest
from jaxrag.models.forms import take_forms
from jaxrag.models.hf import load_config, load_hf, names_dtype
from jaxrag.models.hub import fetched, is_hub_name
from jaxrag.models.int8 import with_int8_weights
from jaxrag.models.linear import by_layer, gains_by_layer
from jaxrag.models.llama_cpp import ENGINES, Elsewhere, open_llama_cpp
from jaxrag.models.map_rows import open_map_rows
from jaxrag.models.maps import MAP_FORMS, MapForm
from jaxrag.models.memory import check_pool, memory_of, require_room, require_room_for_int8
from jaxrag.models.reading import Reading, read_reading
from jaxrag.models.record import read_record
from jaxrag.models.recurrent import packed
from jaxrag.models.rope import RopeFactors, RopeTable, rope_factors, rope_tables
from jaxrag.models.segments import positions_follow_order
from jaxrag.models.shares import as_held, by_heads, head_share, own_heads, put_share
from jaxrag.models.spec import Params, init_params, num_params, param_shardings
from jaxrag.models.text.guidance import Grammar, grammar_of
from jaxrag.models.text.prompts import (
    DEFAULT_TEMPLATE,
    PromptTemplate,
    read_prompt,
    suited_template,
    template_named,
)
from jaxrag.models.text.tokenizer import Tokenizer, check_vocab

_KEPT_ROPE = 8192  # positions of a table that is small beside what host memory frees

KV_VERSION = 1  # of what a stored chunk means; part of every key

DecoderWeights = Literal["stacked", "by_layer", "decode"]


@dataclasses.dataclass(eq=False, repr=False)
class Model:
    """Weights and what belongs to them. Make one with ``load_model`` or ``random_model``.

    It owns no KV. The engine that serves it is made at the first request and kept in ``engine``, so
    that the page pool lives as long as the model does (engine.engine_of).

    Attributes:
      tokenizer: None where the directory has none; such a model takes token ids.
      path: the directory it came from.
      mesh: the devices it is spread over; None is the default device.
      cache_tokens: size of its engine's page pool; None leaves that to the engine.
      template: the prompt format that it was trained with, from its directory's ``prompt.toml``;
        used where no other is named.
      reading: how it was trained to read chunks, from ``reading.toml``.
      placement: where its engine's pool has K and V.
      decode_weights: "int8" on a CPU: decode steps read the matrices as int8, prefill as they are.
      maps: how those of recurrent layers are stored.
      backend: what reads and decodes rows, where requests share no pool.
      engine: the slot for ``engine.engine_of``.
    """

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer | None
    digest: str
    path: str | None = None
    mesh: Mesh | None = None
    cache_tokens: int | None = None
    template: PromptTemplate | None = None
    reading: Reading = dataclasses.field(default_factory=Reading)
    placement: KVPlacement = ON_DEVICE
    decode_weights: DecodeWeights | None = None
    maps: MapForm = "float32"
    backend: RowBackend | None = None
    engine: Any = dataclasses.field(default=None, init=False, repr=False)
    _ropes: dict[int, RopeTable] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_kernels(self.config.kernels)
        take_forms()
        if self.decode_weights not in (None, *get_args(DecodeWeights)):
            raise RequestError(f"decode_weights={self.decode_weights!r}: expected 'int8' or None")
        if self.decode_weights and (self.mesh is not None or jax.default_backend() != "cpu"):
            raise ConfigError(
                f"decode_weights={self.decode_weights!r}: only for one CPU, and this model is on "
                f"{'a mesh' if self.mesh is not None else jax.default_backend()}; leave it out"
            )
        if self.decode_weights and (self.config.experts or self.config.recurrent):
            raise ConfigError(
                f"decode_weights={self.decode_weights!r}: not for a model with experts or "
                "recurrent layers; leave it out"
            )
        fastest = self.placement.on_device and measured_kernels()
        if self.config.kernels == "measured" and not fastest:
            self.config = dataclasses.replace(self.config, kernels="xla")
        by_device = self.config.kernels != "xla" or self.config.experts is not None
        if by_device and self.mesh is not None and self.mesh.size > 1:
            self.config = dataclasses.replace(self.config, kernel_mesh=self.mesh)
        if self.tokenizer is not None:
            check_vocab(self.tokenizer, self.config)
        check_pool(self.config, self.mesh, self.cache_tokens, self.placement)
        if self.config.recurrent is not None and self.backend is None:
            self.backend = open_map_rows(
                self.config, self._by_layer, self.maps, self.cache_tokens, self.mesh
            )

    def __repr__(self) -> str:
        """What it is and where, on one line."""
        c = self.config
        if isinstance(self.params, Elsewhere) and self.backend is not None:
            return f"<Model {self.path!r}: {c.family}, {self.backend.engine}>"
        place = "default device" if self.mesh is None else f"{self.mesh.size} devices"
        return (
            f"<Model {self.path or 'random'!r}: {c.family}, {num_params(c):,} parameters in "
            f"{c.dtype}, context {c.max_positions}, {place}, KV on the {self.placement.kv}>"
        )

    def placed(self, placement: KVPlacement) -> "Model":
        """The same weights with K and V elsewhere, under the same ceiling; an engine of its own.

        Raises RequestError or ConfigError where kernels or mesh do not allow that.
        """
        wanted = dataclasses.replace(placement, max_host_bytes=self.placement.max_host_bytes)
        return self if wanted == self.placement else dataclasses.replace(self, placement=wanted)

    def decoding_with(self, weights: DecodeWeights | None) -> "Model":
        """The same weights, of which decode steps read a copy in int8; an engine of its own.

        It has a scale for each output, and its rounding is in what they compute; prefill reads the
        weights as they are. None: they do as well.

        Raises ConfigError but on one CPU, RequestError for other weights, ModelError where memory
        has no room for the copy.
        """
        if weights == self.decode_weights:
            return self
        model = dataclasses.replace(self, decode_weights=weights)
        if weights == "int8":
            memory = memory_of(self.config, None, self.cache_tokens, self.placement)
            require_room_for_int8(self.path or "this model", self.config, memory)
        return model

    def with_soft(self, vectors: HostArray) -> "Model":
        """The same weights, which read ids from the vocabulary's size on as vectors [R, D] float32.

        Or as K before rotation and V of every layer, [R, L, 2, K, H] float32. It encodes; its
        engine is this model's, which knows nothing of such ids.
        """
        if self.backend is not None:
            raise RequestError(f"{self.backend.called} reads no vectors; use a primer of text")
        model = copy.copy(self)
        soft = self.put(np.asarray(vectors, np.float32).astype(self.config.dtype))
        model.params = self.params.with_soft(soft)
        return model

    @property
    def num_ids(self) -> int:
        """How many ids have an embedding: those of the vocabulary, and of ``with_soft``."""
        soft = self.params.soft
        return self.config.vocab_size + (0 if soft is None else soft.shape[0])

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identity of everything that shapes cached KV: weights, config, dtype, RoPE, version."""
        named = {
            "weights": self.digest,
            "config": config_to_dict(self.config),
            "kv_version": KV_VERSION,
        }
        if self.backend is not None:
            named["engine"] = self.backend.identity
        return fingerprint(named)

    @property
    def max_encoded(self) -> int:
        """How many tokens a chunk may have, with what it is encoded behind."""
        limit = self.config.max_positions
        return limit if self.backend is None else min(limit, self.backend.most_read)

    @property
    def whole_kv_layout(self) -> KVLayout:
        """Sizes and dtype of the chunk KV this model makes, as a repository holds it."""
        c = self.config
        if self.backend is not None:
            return self.backend.layout
        return KVLayout(c.num_kv_layers, c.num_kv_heads, c.head_dim, c.dtype)

    @functools.cached_property
    def kv_layout(self) -> KVLayout:
        """The same of this process's heads: all of them, unless several hold the model."""
        return self.whole_kv_layout.of_share(self.head_share)

    @functools.cached_property
    def head_share(self) -> HeadShare:
        """The KV heads that this process holds; all of them, unless several hold the model."""
        return head_share(self.mesh, self.config.num_kv_heads)

    def held(self, store: KVStore) -> KVStore:
        """A store as this process reads and writes it: chunks of its heads (``kv_layout``)."""
        return as_held(self.mesh, self.head_share, store)

    def exchange(self, value: Any) -> list[Any]:
        """What every process that holds the model passes (``sharding.exchange``)."""
        return exchange(self.mesh, value)

    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer; TokenizerError when the model directory has none."""
        if self.tokenizer is None:
            raise TokenizerError(
                f"{self.path or 'this model'} has no tokenizer.json and cannot take text; pass "
                f"token ids instead, or put the model's tokenizer.json into the directory"
            )
        return self.tokenizer

    def prompt_format(self, wanted: str = DEFAULT_TEMPLATE) -> PromptTemplate:
        """The template where none is named: its own, else what suits it (suited_template)."""
        return self.template or suited_template(self.tokenizer, template_named(wanted))

    @property
    def rows_in_turn(self) -> bool:
        """Do the rows of a batch attend one after the other? On one CPU that is faster."""
        return self.mesh is None and jax.default_backend() == "cpu"

    def rope(self, num_positions: int) -> RopeTable:
        """Rotation tables for at least ``num_positions`` positions, rounded up to a bucket.

        Short ones are kept, and all of a model whose KV is on the device.
        """
        size = bucket(num_positions, 1024)
        if size in self._ropes:
            return self._ropes[size]
        table = rope_tables(self.config, size)
        placed: RopeTable = jax.tree.map(lambda x: self.put(np.asarray(x)), table)
        if not self.placement.away or size <= _KEPT_ROPE:
            self._ropes[size] = placed
        return placed

    @functools.cached_property
    def rope_factors(self) -> RopeFactors:
        """The same for the whole context, in a memory that hardly grows with it."""
        return rope_factors(self.config, self.config.max_positions)

    @functools.cached_property
    def _by_layer(self) -> Params:
        """The weights with layers apart, in the memory of ``params``."""
        apart = gains_by_layer(self.params, self.mesh)
        return by_layer(self.params, self.config.stacks) if apart else self.params

    @functools.cached_property
    def _decode_params(self) -> Params:
        """The weights that decode steps read."""
        return with_int8_weights(self.params) if self.decode_weights == "int8" else self._by_layer

    def decoder(self, num_positions: int, weights: DecoderWeights = "stacked") -> Decoder:
        """What a compiled step over at most ``num_positions`` positions needs of this model.

        ``weights``: "by_layer", every layer's apart where that makes the step faster; "decode",
        those that decode steps read, in this way.
        """
        by_layer = self._decode_params if weights == "decode" else self._by_layer
        return Decoder(
            params=self.params if weights == "stacked" else by_layer,
            rope=self.rope(num_positions),
            config=self.config,
            factors=self.rope_factors if self.placement.away else None,
        )

    def logits(
        self,
        ids: Any,
        positions: Any = None,
        segments: Any = None,
        prefix_visible: bool = False,
        examples: Any = None,
    ) -> Array:
        """Packed forward without a cache.

        Args:
          ids: [B, T] integers.
          positions: [B, T], None = order within the row.
          segments: [B, T] (0 empty, 1 prefix, 2 final block, 3.. chunks), None = plain causal.
          prefix_visible: may chunks see the prefix?
          examples: [B, T] packed examples (segments.example_ids), None = one a row.

        Returns:
          float32 logits [B, T, V].

        Raises:
          RequestError: shapes that differ, ids outside the vocabulary, or positions that are not
            the order of the tokens under a sliding window.
        """
        ids = _int_rows("ids", ids, None)
        batch, length = ids.shape
        if ids.size and (ids.min() < 0 or ids.max() >= self.num_ids):
            raise RequestError(
                f"ids hold {ids.min()}..{ids.max()}, the vocabulary is 0..{self.num_ids - 1}"
            )
        order = np.broadcast_to(np.arange(length, dtype=np.int32), ids.shape)
        positions = order if positions is None else _int_rows("positions", positions, ids.shape)
        segments = (
            np.full(ids.shape, FINAL, np.int32)
            if segments is None
            else _int_rows("segments", segments, ids.shape)
        )
        examples = None if examples is None else _int_rows("examples", examples, ids.shape)
        if (positions[segments != EMPTY] < 0).any():
            raise RequestError("positions of tokens must not be negative")
        if self.config.sliding_window is not None and not positions_follow_order(
            positions, segments, examples
        ):
            raise RequestError(
                f"positions restart inside the prompt, and a sliding window of "
                f"{self.config.sliding_window} tokens is measured in order; use reordered positions"
            )
        put = functools.partial(self.put_batch, batch=batch)
        tokens = Tokens(
            ids=put(ids),
            positions=put(np.maximum(positions, 0)),
            segments=put(segments),
            examples=None if examples is None else put(examples),
        )
        table = self.rope(int(positions.max(initial=0)) + 1)
        return _logits(self.params, self.config, tokens, table, prefix_visible)

    def put_batch(self, x: HostArray, batch: int) -> Array:
        """Place a host array whose first axis is the batch, over (data, fsdp) if they divide it.

        On a single device it stays on the host: a compiled function takes it from there sooner.
        """
        if self.mesh is None:
            return cast(Array, x)
        ways = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        spec = PartitionSpec(Rules().batch) if batch % ways == 0 else PartitionSpec()
        return put(x, NamedSharding(self.mesh, spec))

    def put(self, x: HostArray) -> Array:
        """Place a host array whole on every device."""
        return jax.device_put(x) if self.mesh is None else put(x, replicated(self.mesh))

    def put_kv(self, kv: HostArray) -> Array:
        """Place KV [L, 2, T, K / ways, H] of this process's heads as [L, 2, T, K, H], by heads.

        ``kv`` may be read in place: leave it as it is until what reads it is ready.
        """
        return to_device(kv) if self.mesh is None else put_share(self.mesh, self.head_share, kv)

    def put_heads(self, x: HostArray, axis: int) -> Array:
        """The same of an array whose dimension ``axis`` is this process's KV heads."""
        if self.mesh is None:
            return to_device(x)
        return put_share(self.mesh, self.head_share, x, axis)

    def own_heads(self, x: Array, axis: int) -> HostArray:
        """What this process has of an array, by its dimension of KV or query heads."""
        return own_heads(self.mesh, self.head_share, x, axis)

    def by_heads(self, *rows: Array) -> tuple[Array, ...]:
        """K and V [L, B, T, K, H] placed so that ``sharding.host_part`` is this process's heads."""
        return by_heads(self.mesh, self.head_share, rows)

    def zeros(self, shape: tuple[int, ...], dtype: str | None = None) -> Array:
        """Zeros, in the model's dtype if none is named, whole on every device."""
        place = None if self.mesh is None else replicated(self.mesh)
        return _zeros(shape, dtype or self.config.dtype, place)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end its answers."""
        tokenizer = self.tokenizer
        return frozenset((*self.config.eos_ids, *(tokenizer.eos_ids if tokenizer else ())))

    def grammar(self, guide: Guide | None) -> Grammar | None:
        """A guide for its answers, made once; errors as those of ``Grammar``.

        Raises RequestError where the model is of several processes.
        """
        if guide is None:
            return None
        if jax.process_count() > 1:
            raise RequestError("guide: several processes give no answers of a form; use one")
        size = self.config.vocab_size
        eos_ids = frozenset(eos_id for eos_id in self.eos_ids if eos_id < size)
        return grammar_of(self.text_tokenizer(), guide, size, eos_ids)

    @property
    def batch_ways(self) -> int:
        """How many groups of devices a batch is split over."""
        return 1 if self.mesh is None else self.mesh.shape["data"] * self.mesh.shape["fsdp"]


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "place"))
def _zeros(shape: tuple[int, ...], dtype: str, place: NamedSharding | None) -> Array:
    zeros = jnp.zeros(shape, dtype)
    return zeros if place is None else jax.lax.with_sharding_constraint(zeros, place)


@functools.partial(jax.jit, static_argnames=("config", "prefix_visible"))
def _logits(
    params: Params, config: ModelConfig, tokens: Tokens, table: RopeTable, prefix_visible: bool
) -> Array:
    attend = PackedAttend(config, table, prefix_visible)
    memory = packed(config, tokens, prefix_visible)
    hidden, _, _ = forward(params, config, tokens, None, attend, recurrent=memory)
    return unembed(params, config, hidden)


def _int_rows(name: str, x: Any, shape: tuple[int, ...] | None) -> HostArray:
    """x as int32 [B, T]; RequestError when it is not integers of that shape."""
    try:
        x = np.asarray(x)
    except ValueError:
        raise RequestError(f"{name}: expected integers [B, T], got rows of other lengths") from None
    if x.ndim != 2 or not np.issubdtype(x.dtype, np.integer):
        raise RequestError(f"{name}: expected integers [B, T], got {x.dtype} {x.shape}")
    if shape is not None and x.shape != shape:
        raise RequestError(f"{name}: shape {x.shape} differs from that of ids, {shape}")
    return x.astype(np.int32)


def load_model(
    path: str | Path,
    mesh: Mesh | None = None,
    dtype: str | None = None,
    cache_tokens: int | None = None,
    kernels: Kernels = "measured",
    value_layers: int | None = None,
    max_host_bytes: int | None = None,
    kv: KVHome = "device",
    engine: str = "jax",
) -> Model:
    """Load a Hugging Face directory, a jaxrag checkpoint or a GGUF file.

    What does not fit is refused before a weight is read or fetched. What is compiled from then on
    is kept in the user's cache directory for the next process, unless JAX was given another one.

    Args:
      path: the directory, or the GGUF file; or ORG/NAME, or ORG/NAME@REVISION, of a model on the
        Hugging Face hub, which is fetched where huggingface_hub is installed.
      mesh: where to put it (sharding.make_mesh); None = the default device.
      dtype: "float32", "bfloat16" or "float16" for parameters, activations and KV; None = as the
        model's config says; of a GGUF file that is quantised "bfloat16".
      cache_tokens: size of the paged pool; None = half of the memory left, on CPUs 1 GiB at most.
      kernels: which body of the attention ops runs, "xla" or, on NVIDIA GPUs, "pallas_triton";
        "measured": of each op the one that was measured to be right and fastest on this device.
      value_layers: keep V of this many layers on the device, of the others in host memory; None =
        all on the device.
      max_host_bytes: ceiling of that host memory.
      kv: "host" keeps K and V in host memory; then ``cache_tokens`` is the size of the pool there,
        None = a quarter of the memory that is free.
      engine: what reads and decodes: "jax", or "llama_cpp" in a process of its own, of a GGUF file;
        "llama_cpp:q8_0" and "llama_cpp:q4_0" keep KV in these types, "llama_cpp" as f16. Of the
        other arguments ``cache_tokens`` holds there too. "jax:bfloat16" and "jax:int8" store maps
        of recurrent layers so, "jax" as float32.

    Raises:
      ModelError, ConfigError: a missing, truncated, unsupported or inconsistent directory, one that
        cannot be fetched, weights or a pool that find no room, a ``prompt.toml`` or
        ``reading.toml`` that is none, or kernels that do not run here.
      RequestError: an argument of another kind, or a pool that no model can have.
      TokenizerError: a tokenizer that cannot be read or is larger than the vocabulary.
    """
    if not isinstance(path, str | Path):
        raise RequestError(
            f"path={reprlib.repr(path)}: expected a directory, a GGUF file, or ORG/NAME"
        )
    if not (mesh is None or isinstance(mesh, Mesh)):
        raise RequestError(f"mesh={reprlib.repr(mesh)}: expected one that make_mesh gives, or None")
    keep_compiled()
    if engine not in MAP_FORMS:
        others = mesh, dtype, value_layers, max_host_bytes
        return _load_elsewhere(Path(path), engine, cache_tokens, others == (None,) * 4)
    check_kernels(kernels)
    placement = KVPlacement(kv, value_layers, max_host_bytes)

    def require(directory: Path) -> None:
        planned = dataclasses.replace(read_config(directory, dtype), kernels=kernels)
        check_pool(planned, mesh, cache_tokens, placement)
        require_room(directory, planned, memory_of(planned, mesh, cache_tokens, placement))

    if is_hub_name(path):
        path = fetched(str(path), lambda config: require(config) if names_dtype(config) else None)
    path = Path(path)
    template, reading = read_prompt(path), read_reading(path)
    require(path)
    load = load_checkpoint if is_checkpoint(path) else load_hf
    config, params, tokenizer = load(path, mesh=mesh, dtype=dtype)
    return Model(
        config=dataclasses.replace(config, kernels=kernels),
        params=params,
        tokenizer=tokenizer,
        digest=weights_digest(path),
        path=str(path),
        mesh=mesh,
        cache_tokens=cache_tokens,
        template=template,
        reading=reading,
        placement=placement,
        maps=_form_of(engine, config),
    )


def _form_of(engine: str, config: ModelConfig) -> MapForm:
    if config.recurrent is None and engine != "jax":
        raise RequestError(
            f"engine={engine!r} is how maps of recurrent layers are stored, of which a "
            f"{config.family} model has none; choose 'jax'"
        )
    return MAP_FORMS[engine]


def _load_elsewhere(path: Path, engine: str, cache_tokens: int | None, alone: bool) -> Model:
    if engine not in ENGINES:
        known = ", ".join([*MAP_FORMS, *ENGINES])
        raise RequestError(f"engine={engine!r:.80}: expected one of {known}")
    if not alone:
        raise RequestError(f"engine={engine!r} has no mesh, dtype and host memory; leave them out")
    tokenizer = Tokenizer.find(path) if is_gguf(path) else None
    leading = np.zeros(0, np.int32) if tokenizer is None else tokenizer.leading_ids
    backend, config = open_llama_cpp(path, engine, cache_tokens, leading)
    return Model(
        config=config,
        params=cast(Params, Elsewhere()),
        tokenizer=tokenizer,
        digest=file_digest(path),
        path=str(path),
        cache_tokens=backend.cells,
        backend=backend,
    )


def read_config(path: Path, dtype: str | None = None) -> ModelConfig:
    """The config of a directory, in ``dtype`` if one is named; no weight is read.

    Raises ModelError and ConfigError as ``load_model`` does.
    """
    config = read_record(path).config if is_checkpoint(path) else load_config(path)
    return config if dtype is None else dataclasses.replace(config, dtype=cast(DType, dtype))


def random_model(
    config: ModelConfig,
    seed: int = 0,
    tokenizer: Tokenizer | None = None,
    mesh: Mesh | None = None,
    cache_tokens: int | None = None,
    placement: KVPlacement = ON_DEVICE,
) -> Model:
    """A model with random weights: for tests and for timing shapes without a checkpoint.

    Nobody takes its answers for answers: it counts as trained for every method.
    """
    shardings = None if mesh is None else param_shardings(config, mesh)
    make = jax.jit(init_params, static_argnums=0, out_shardings=shardings)  # compiled once
    params = make(config, jax.random.key(seed))
    return Model(
        config=config,
        params=params,
        tokenizer=tokenizer,
        digest=params_digest(params),
        mesh=mesh,
        cache_tokens=cache_tokens,
        reading=Reading(("reordered", "composite")),
        placement=placement,
    )


def as_token_ids(ids: Sequence[int] | HostArray, config: ModelConfig, what: str) -> HostArray:
    """Validate token ids given by a caller: int32 [T], not empty, inside the vocabulary."""
    out = np.asarray(ids)
    if out.ndim != 1 or not out.size or not np.issubdtype(out.dtype, np.integer):
        raise RequestError(f"{what}: expected a non-empty sequence of token ids, got {ids!r:.60}")
    if out.min() < 0 or out.max() >= config.vocab_size:
        raise RequestError(
            f"{what}: token ids {out.min()}..{out.max()} are outside the vocabulary "
            f"0..{config.vocab_size - 1}"
        )
    return out.astype(np.int32)
