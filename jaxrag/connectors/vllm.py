"""A KV connector for vLLM: stored chunks are its computed prefix, only the rest is prefilled.

``vllm serve DIR --kv-transfer-config`` with the JSON that `jaxrag kb connector` prints. One object
lives in the scheduler's process, one in each worker's. The scheduler's plans a prompt when it
arrives, and has its parts read, checked and turned to their places. Then it promises them, and the
workers copy them into their pages, which cannot fail. What is not in memory in time makes the
request an exact one. Pages of stored parts go by a salt of the plan, so that vLLM's own prefix
cache never gives them to an exact request, nor exact ones to a request with parts.
"""

import collections
import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request

from jaxrag.base.errors import ConfigError, JaxragError
from jaxrag.base.tables import build
from jaxrag.connectors.counts import ConnectorMetrics, Counts
from jaxrag.connectors.fetch import Fetches, SharedArray, reason_of
from jaxrag.connectors.manifest import Manifest, Watched, weights_of
from jaxrag.connectors.plan import PartsPlan, Planner, spans_of
from jaxrag.connectors.prompt_log import PromptLog
from jaxrag.connectors.rotation import rope_table
from jaxrag.connectors.settings import ConnectorSettings, verdict
from jaxrag.kv.store import ChunkStore
from jaxrag.kv.store.layout import HeadShare, KVLayout

_LOG = logging.getLogger("vllm.jaxrag")  # vLLM shows its own loggers only
_ROWS = 64  # of the engine's table of angles that are compared
_MEMO = Path.home() / ".cache" / "jaxrag" / "engine-weights.json"  # digests of weights
_PASSAGES = 256  # tokens behind the parts that may hold a passage, beside a question


@dataclasses.dataclass
class PageLoad:
    """What a worker writes: KV [L, 2, T, K, H] of tokens from ``start`` on, into blocks."""

    name: str
    kv: "NDArray[Any] | SharedArray"
    start: int
    blocks: list[int]  # of the whole request


@dataclasses.dataclass
class Loads(KVConnectorMetadata):
    """Those of one step."""

    loads: list[PageLoad]


@dataclasses.dataclass
class WrittenLoads(KVConnectorWorkerMetadata):
    """How many workers have written what they were to, by request."""

    counts: "collections.Counter[str]"

    def aggregate(self, other: "WrittenLoads") -> "WrittenLoads":
        """Of several workers."""
        return WrittenLoads(self.counts + other.counts)


class JaxragConnector(KVConnectorBase_V1):
    """See the module."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        given = self._kv_transfer_config.kv_connector_extra_config
        self._settings = build(ConnectorSettings, given, "kv_connector_extra_config")
        folder = Path(self._settings.manifest)
        self._watched = Watched(folder)
        self._block_size = vllm_config.cache_config.block_size
        engine = self._watched.manifest.engine
        _check(vllm_config, kv_cache_config.kv_cache_groups, self._watched.manifest, self._settings)
        parallel = vllm_config.parallel_config
        self._ways = parallel.tensor_parallel_size
        self._counts = Counts()
        if role == KVConnectorRole.WORKER:
            ways = min(self._ways, engine.layout.num_kv_heads)
            self._share = HeadShare(parallel.rank % self._ways * ways // self._ways, ways)
            self._written: collections.Counter[str] = collections.Counter()
            return
        secret = self._settings.secret(engine.sealed)
        place = engine.store, engine.fingerprint, engine.layout
        self._store = ChunkStore.open(*place, secret=secret)
        shared = parallel.world_size > 1
        self._fetches = Fetches(self._store, engine.rope, self._settings, shared=shared)
        self._prompt_log = PromptLog(folder, engine.tokenizer, self._settings.wanted_bytes)
        self._planner = Planner(self._watched.manifest)
        self._asked: dict[str, tuple[PartsPlan, str | None]] = {}  # and their own salts
        self._loads: list[PageLoad] = []
        self._answers: dict[str, dict[str, Any]] = {}  # what a request that asked is answered

    # In the scheduler's process.

    def on_new_request(self, request: Any) -> None:
        """Plan a request before anything is looked up for it."""
        params = (request.kv_transfer_params or {}).get("jaxrag")
        others = [request.mm_features, request.lora_request, request.pooling_params]
        others += [request.resumable, request.skip_reading_prefix_cache]
        ids = request.prompt_token_ids
        if ids is None or request.prompt_embeds is not None or any(others):
            return
        plan, reason = self._plan(ids, params)
        if params is not None:
            self._answers[request.request_id] = {"stored": 0 if plan is None else plan.end}
        if plan is None:
            self._tell(request.request_id, reason)
            return
        self._asked[request.request_id] = plan, request.cache_salt
        salt = plan.salt(self._store.fingerprint)
        self._salt(request, (request.cache_salt or "") + salt)

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """What lies in memory behind the engine's own pages; None: ask again."""
        name = request.request_id
        plan, own_salt = self._asked.get(name, (PartsPlan(()), None))
        if plan.end <= computed:
            return 0, False
        try:
            ready = self._fetches.ready(name, plan, computed)
        except JaxragError as error:
            _LOG.warning("request %s is computed: %s", name, error)
            del self._asked[name]
            self._fetches.end(name)
            self._salt(request, own_salt)
            self._tell(name, reason_of(error))
            return None, False  # its own pages are to be looked for without the salt
        return (plan.end - computed if ready else None), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The engine takes the promise."""
        if num_external_tokens > 0:
            name = request.request_id
            start = self._asked[name][0].end - num_external_tokens
            kv = self._fetches.take(name, start)
            nbytes = self._store.layout.nbytes(num_external_tokens)
            seconds = self._fetches.seconds(name)
            self._counts.add(requests=1, tokens=num_external_tokens, bytes=nbytes, seconds=seconds)
            self._loads.append(PageLoad(name, kv, start, list(blocks.get_block_ids()[0])))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """What the workers write in this step."""
        loads, self._loads = self._loads, []
        return Loads(loads)

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers wrote may be let go."""
        written = connector_output.kv_connector_worker_meta
        for name, count in () if written is None else written.counts.items():
            if count >= self._ways:
                self._fetches.loaded(name)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Every request ends here."""
        self._asked.pop(request.request_id, None)
        self._fetches.end(request.request_id)
        loaded = self._answers.pop(request.request_id, None)
        return False, None if loaded is None else {"jaxrag": loaded}

    def get_kv_connector_stats(self) -> Counts | None:
        """What was counted since the last call."""
        counts, self._counts = self._counts, Counts()
        return None if counts.is_empty() else counts

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Counts:
        """What came from another process."""
        return Counts(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> ConnectorMetrics:
        """The counters of vLLM's /metrics."""
        return ConnectorMetrics(*args)

    # In a worker's process.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Write the parts of this step before its forward pass."""
        for load in self._get_connector_metadata().loads:
            self._write(load)
            self._written[load.name] += 1

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Which requests' parts were written."""
        written, self._written = self._written, collections.Counter()
        return WrittenLoads(written) if written else None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All layers were written before the forward pass."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Chunks are made offline."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def shutdown(self) -> None:
        """Let go of threads and files."""
        if self._role == KVConnectorRole.SCHEDULER:
            self._fetches.close()
            self._store.close()

    def _plan(self, ids: list[int], params: Any) -> tuple[PartsPlan | None, str]:
        manifest = self._watched.current()
        if manifest is None:
            return None, "manifest"
        if manifest is not self._planner.manifest:
            self._planner = Planner(manifest)
        try:
            wanted, spans = spans_of(params)
        except ValueError as error:
            _LOG.warning("%s", error)
            return None, "spans"
        if not wanted or (spans is None and not self._settings.recognise):
            return None, "off"
        prompt = np.array(ids, np.int32)
        plan, reason = self._planner.plan(prompt, spans, self._settings.compute_last)
        rest = len(prompt) - (plan.end if plan else 0)
        if reason in ("missing", "unknown") or (spans is None and rest >= _PASSAGES):
            self._prompt_log.note(prompt, spans)
        return plan, reason

    def _salt(self, request: Any, salt: str | None) -> None:
        """Give its pages another name; nothing of it has been looked up."""
        request.cache_salt = salt
        request.block_hashes.clear()
        request.update_block_hashes()

    def _tell(self, name: str, reason: str) -> None:
        self._counts.add(**{f"computed:{reason}": 1})
        if name in self._answers:
            self._answers[name] = {"stored": 0, "computed": reason}

    def _write(self, load: PageLoad) -> None:
        kv = load.kv.open() if isinstance(load.kv, SharedArray) else load.kv
        first, end = self._share.heads(kv.shape[3])
        positions = np.arange(load.start, load.start + kv.shape[2])
        blocks = np.array(load.blocks, np.int64)[positions // self._block_size]
        slots = torch.from_numpy(blocks * self._block_size + positions % self._block_size)
        dtype = getattr(torch, kv.dtype.name)  # from_numpy does not know NumPy's bfloat16
        layers = self._vllm_config.compilation_config.static_forward_context
        for name in self._kv_cache_config.kv_cache_groups[0].layer_names:
            layer = layers[name]
            pages = layer.kv_cache
            content = np.ascontiguousarray(kv[extract_layer_index(name)][:, :, first:end])
            both = torch.from_numpy(content.view(np.uint8)).view(dtype).to(pages.device)
            layer.impl.do_kv_cache_update(layer, both[0], both[1], pages, slots.to(pages.device))


def _check(config: Any, groups: Any, manifest: Manifest, settings: ConnectorSettings) -> None:
    """Refuse, in one line, an engine that stored parts are not for. Raises ConfigError."""
    model, parallel = config.model_config, config.parallel_config
    engine = manifest.engine
    salts = hasattr(KVConnectorBase_V1, "on_new_request")
    if not salts or not hasattr(Request, "update_block_hashes"):
        raise ConfigError("this vLLM cannot salt the pages of a request: use vLLM 0.24 or newer")
    if config.kv_transfer_config.kv_role != "kv_consumer":
        raise ConfigError("kv_role: expected kv_consumer, as nothing is saved")
    specs = [group.kv_cache_spec for group in groups]
    if len(specs) != 1 or type(specs[0]) is not FullAttentionSpec or specs[0].sliding_window:
        kinds = ", ".join(type(spec).__name__ for spec in specs)
        raise ConfigError(f"the model keeps {kinds}: expected full attention in every layer")
    for name in ("pipeline", "decode_context", "prefill_context"):
        if getattr(parallel, f"{name}_parallel_size", 1) > 1:
            raise ConfigError(f"{name}_parallel_size: expected 1; tensor parallel works")
    layers = len(groups[0].layer_names)
    dtype = str(model.dtype).removeprefix("torch.")
    theirs = KVLayout(layers, model.get_total_num_kv_heads(), specs[0].head_size, dtype)  # type: ignore[arg-type]
    ours = dataclasses.replace(engine.layout, stored="native")
    if theirs != ours:
        raise ConfigError(f"the model has {theirs}, the stored chunks {ours}")
    if engine.layout.drops:
        raise ConfigError(f"stored={engine.layout.stored!r} leaves tokens out: use int4 or int8")
    folder = Path(model.model)
    if not folder.is_dir():
        raise ConfigError(f"{model.model}: serve the folder that `jaxrag kb connector` looked at")
    if weights_of(folder, _MEMO) != engine.weights:
        fix = "`jaxrag kb connector KB OUT --serve DIR` with the folder that vLLM serves"
        raise ConfigError(f"{folder} holds other weights than the chunks were made with: {fix}")
    _check_rope(config, manifest)
    if settings.require_gate and not verdict(manifest, settings.compute_last):
        raise ConfigError(
            "nothing says that answers from stored chunks alone are good: run `jaxrag kb gate "
            "--recompute-ratios 0`, or use `jaxrag serve`; require_gate=false starts all the same"
        )
    if config.device_config.device_type != "cpu" and not settings.untested_devices:
        raise ConfigError("written for GPUs and run on CPUs only: untested_devices=true tries it")


def _check_rope(vllm_config: Any, manifest: Manifest) -> None:
    """Compare the engine's table of angles with ours: another scaling would be silent."""
    rope = manifest.engine.rope
    config = vllm_config.model_config.hf_text_config
    given = getattr(config, "rope_parameters", None)
    if not given or "mrope_section" in given:
        raise ConfigError(f"rope_parameters={given}: expected rotary positions of one axis")
    if rope.interleaved != config.model_type.startswith("glm"):
        kind = config.model_type
        raise ConfigError(f"model_type={kind!r} pairs other dimensions than the chunks'")
    with set_current_vllm_config(vllm_config):
        table = get_rope(
            manifest.engine.layout.head_dim,
            max_position=config.max_position_embeddings,
            is_neox_style=not rope.interleaved,
            rope_parameters=given,
        ).cos_sin_cache
    ours = np.concatenate(rope_table(rope, 0, _ROWS), 1)
    theirs = table[:_ROWS].float().cpu().numpy()
    if ours.shape != theirs.shape or not np.allclose(ours, theirs, atol=1e-2):
        raise ConfigError(f"rope_parameters={given}: other angles than the chunks' {rope}")
