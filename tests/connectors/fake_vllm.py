"""A stand-in for what the connector uses of vLLM and torch, and an engine of one page pool.

The engine calls the connector as vLLM's scheduler and worker do: a request is planned when it is
added, its own pages are looked up by hashes that begin with its salt, the connector is asked until
it answers, pages are given and cached, the worker writes before the forward pass, and what is
left is computed. A page that is computed holds 1000 + the token in every element.
"""

import contextlib
import dataclasses
import hashlib
import sys
import time
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np

BLOCK = 16


class Tensor(np.ndarray):
    """An array with the few methods that the connector calls."""

    @property
    def device(self):
        return "cpu"

    def to(self, device):
        return self

    def float(self):
        return self

    def cpu(self):
        return self

    def numpy(self):
        return np.asarray(self)


def from_numpy(array):
    return array.view(Tensor)


class Base:
    def __init__(self, vllm_config, role, kv_cache_config):
        self._vllm_config, self._role = vllm_config, role
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self._meta = None

    def _get_connector_metadata(self):
        return self._meta

    def on_new_request(self, request):
        pass


@dataclasses.dataclass
class Stats:
    data: dict = dataclasses.field(default_factory=dict)


class PromMetrics:
    def __init__(self, config, types, labels, values):
        self._counter_cls, self.per_engine_labelvalues = types["counter"], values


@dataclasses.dataclass(frozen=True)
class FullAttentionSpec:
    head_size: int
    sliding_window: int | None = None


class MLASpec(FullAttentionSpec):
    """As in vLLM a subclass, whose pages hold something else."""


class Request:
    def __init__(self, name, ids, params=None, salt=None):
        self.request_id, self.prompt_token_ids = name, [int(it) for it in ids]
        self.kv_transfer_params = None if params is None else {"jaxrag": params}
        self.cache_salt, self.block_hashes = salt, []
        self.prompt_embeds = self.lora_request = self.pooling_params = None
        self.mm_features, self.resumable, self.skip_reading_prefix_cache = [], False, False
        self.update_block_hashes()

    def update_block_hashes(self):
        seen = (self.cache_salt or "").encode()
        for end in range(BLOCK, len(self.prompt_token_ids) + 1, BLOCK):
            seen += str(self.prompt_token_ids[end - BLOCK : end]).encode()
            self.block_hashes.append(hashlib.sha256(seen).digest())


def get_rope(head_size, max_position, is_neox_style, rope_parameters):
    dim = int(head_size * rope_parameters.get("partial_rotary_factor", 1))
    turns = rope_parameters["rope_theta"] ** -(np.arange(0, dim, 2) / dim)
    angles = np.arange(max_position)[:, None] * turns
    table = np.concatenate((np.cos(angles), np.sin(angles)), 1).astype(np.float32)
    return SimpleNamespace(cos_sin_cache=table.view(Tensor))


def install(monkeypatch):
    """Put the stand-ins where the connector imports them from."""
    roles = SimpleNamespace(SCHEDULER="scheduler", WORKER="worker")
    contents = {
        "torch": {"from_numpy": from_numpy, "Tensor": Tensor, "float32": np.float32},
        "vllm.config": {"set_current_vllm_config": lambda config: contextlib.nullcontext()},
        "vllm.distributed.kv_transfer.kv_connector.v1.base": {
            "KVConnectorBase_V1": Base,
            "KVConnectorMetadata": object,
            "KVConnectorRole": roles,
            "KVConnectorWorkerMetadata": object,
        },
        "vllm.distributed.kv_transfer.kv_connector.v1.metrics": {
            "KVConnectorPromMetrics": PromMetrics,
            "KVConnectorStats": Stats,
        },
        "vllm.model_executor.layers.rotary_embedding": {"get_rope": get_rope},
        "vllm.model_executor.models.utils": {
            "extract_layer_index": lambda name: int(name.split(".")[1])
        },
        "vllm.v1.kv_cache_interface": {"FullAttentionSpec": FullAttentionSpec},
        "vllm.v1.request": {"Request": Request},
    }
    for name, values in contents.items():
        parents = name.split(".")
        for end in range(1, len(parents) + 1):
            path = ".".join(parents[:end])
            if path not in sys.modules or end == len(parents):
                module = types.ModuleType(path)
                module.__path__ = []
                monkeypatch.setitem(sys.modules, path, module)
        for attribute, value in values.items():
            setattr(sys.modules[name], attribute, value)


def config_of(stored, *, ways=1, rank=0, extra=None, **changes):
    """A configuration that suits stored chunks, and that of the pages."""
    layout = stored.layout
    rope = {"rope_theta": 10000.0, "rope_type": "default"} | changes.pop("rope", {})
    spec = changes.pop("spec", FullAttentionSpec)(layout.head_dim, changes.pop("window", None))
    model = SimpleNamespace(
        model=str(stored.folder / "model"),
        dtype=f"torch.{changes.pop('dtype', layout.dtype)}",
        get_total_num_kv_heads=lambda: layout.num_kv_heads,
        hf_text_config=SimpleNamespace(
            rope_parameters=rope, model_type="llama", max_position_embeddings=512
        ),
    )
    transfer = SimpleNamespace(
        kv_role="kv_consumer",
        kv_connector_extra_config={"manifest": str(stored.out), **(extra or {})},
    )
    names = [f"layers.{number}.attn" for number in range(layout.num_layers)]
    vllm = SimpleNamespace(
        kv_transfer_config=transfer,
        model_config=model,
        cache_config=SimpleNamespace(block_size=BLOCK),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=ways, rank=rank, world_size=ways, pipeline_parallel_size=1
        ),
        device_config=SimpleNamespace(device_type=changes.pop("device", "cpu")),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=names)]
    assert not changes, changes
    return vllm, SimpleNamespace(kv_cache_groups=groups)


class Pages:
    """One layer's pages: [slots, 2, K, H]."""

    def __init__(self, blocks, heads, dim):
        self.kv_cache = np.full((blocks * BLOCK, 2, heads, dim), np.nan, np.float32).view(Tensor)
        self.impl = self

    def do_kv_cache_update(self, layer, key, value, kv_cache, slots):
        kv_cache[np.asarray(slots), 0], kv_cache[np.asarray(slots), 1] = key, value


class Engine:
    """One scheduler, ``ways`` workers, ``blocks`` pages that are never let go."""

    def __init__(self, module, stored, *, ways=1, blocks=64, kind=None, extra=None):
        kind = kind or module.JaxragConnector
        self.workers, layout = [], stored.layout
        for rank in range(ways):
            vllm, pages = config_of(stored, ways=ways, rank=rank, extra=extra)
            context = vllm.compilation_config.static_forward_context
            for name in pages.kv_cache_groups[0].layer_names:
                context[name] = Pages(blocks, layout.num_kv_heads // ways, layout.head_dim)
            self.workers.append(kind(vllm, "worker", pages))
        self.scheduler = kind(*self._split(config_of(stored, ways=ways, extra=extra)))
        self.cached, self.free, self.count = {}, list(range(blocks)), 0

    @staticmethod
    def _split(both):
        return both[0], "scheduler", both[1]

    def add(self, ids, params=None, salt=None):
        self.count += 1
        request = Request(f"r{self.count}", ids, params, salt)
        self.scheduler.on_new_request(request)
        return request

    def own(self, request):
        """Pages of the prefix cache that the request hits; one token is always computed."""
        most = (len(request.prompt_token_ids) - 1) // BLOCK
        found = []
        for name in request.block_hashes[:most]:
            if name not in self.cached:
                break
            found.append(self.cached[name])
        return found

    def promised(self, request, seconds=10.0):
        """What the connector promises in the end, and the pages of the cache."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            own = self.own(request)
            count, later = self.scheduler.get_num_new_matched_tokens(request, len(own) * BLOCK)
            assert later is False
            if count is not None:
                return own, count
            time.sleep(0.002)
        raise AssertionError("the connector never answers")

    def run(self, request):
        """Schedule, load and compute; returns what ``seen`` does, and what came from where."""
        own, count = self.promised(request)
        total = len(request.prompt_token_ids)
        blocks = own + [self.free.pop(0) for _ in range(-(-total // BLOCK) - len(own))]
        self.cached |= dict(zip(request.block_hashes, blocks, strict=False))
        given = SimpleNamespace(get_block_ids=lambda: (blocks,))
        self.scheduler.update_state_after_alloc(request, given, count)
        meta = self.scheduler.build_connector_meta(None)
        written = None
        for worker in self.workers:
            worker._meta = meta
            worker.start_load_kv(None)
            mine = worker.build_connector_worker_meta()
            written = mine if written is None else written.aggregate(mine)
        self.scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=written))
        done = len(own) * BLOCK + count
        for worker in self.workers:
            for layer in worker._vllm_config.compilation_config.static_forward_context.values():
                for at in range(done, total):
                    slot = blocks[at // BLOCK] * BLOCK + at % BLOCK
                    layer.kv_cache[slot] = 1000 + request.prompt_token_ids[at]
        return self.seen(blocks, total), (len(own) * BLOCK, count)

    def seen(self, blocks, total):
        """KV [L, 2, T, K, H] as attention would read it, the heads of all workers."""
        slots = [blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(total)]
        ranks = [
            np.stack([
                layer.kv_cache[slots].transpose(1, 0, 2, 3)
                for layer in worker._vllm_config.compilation_config.static_forward_context.values()
            ])
            for worker in self.workers
        ]  # fmt: skip
        return np.asarray(np.concatenate(ranks, 3))

    def end(self, request):
        return self.scheduler.request_finished(request, [])

    def close(self):
        self.scheduler.shutdown()


def exact(ids, layout):
    """What computing all of a prompt leaves in the pages."""
    rows = 1000 + np.asarray(ids, np.float32)
    return np.broadcast_to(rows[None, None, :, None, None], layout.shape(len(ids)))


def weights_path(stored):
    return Path(stored.folder) / "model" / "model.safetensors"
