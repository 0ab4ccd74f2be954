"""What a plan is made from: a TOML file as in configs/plans."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrag.base.config import DType, ModelConfig, config_from_dict
from jaxrag.base.errors import ConfigError
from jaxrag.base.installed import config_path, located
from jaxrag.base.tables import build, override, read_toml
from jaxrag.library.options import DEFAULT_FORM
from jaxrag.models.maps import MAP_FORMS, MapForm
from jaxrag.models.model import read_config
from jaxrag.reuse.methods import METHODS

_AT_MOST_ONE = {"utilisation", "bandwidth_share", "pool_share", "load"}
_FROM_ZERO = {"growth", "popularity", "prefix_tokens", "latency", "overhead"}


@dataclasses.dataclass(frozen=True)
class CorpusSize:
    """The documents, as chunks.

    Attributes:
      chunks: how many.
      chunk_tokens: of each, on average.
      growth: of chunks, every month, as a share of them.
    """

    chunks: int
    chunk_tokens: int
    growth: float = 0.0


@dataclasses.dataclass(frozen=True)
class QueryLoad:
    """The questions.

    Attributes:
      rate: questions a second, at the busiest hour.
      k: chunks a question.
      prefix_tokens: of the system text.
      question_tokens: the question, and what the template writes around it.
      answer_tokens: of an answer, on average.
      popularity: exponent of Zipf's law of the chunks that are found; 0: all alike.
    """

    rate: float
    k: int
    question_tokens: int
    answer_tokens: int
    prefix_tokens: int = 32
    popularity: float = 1.0


@dataclasses.dataclass(frozen=True)
class EngineHardware:
    """What serves one copy of the model.

    Attributes:
      devices: that share the weights by heads.
      flops: of one device, at most, a second.
      utilisation: share of them that prefill reaches.
      memory: bytes of one device.
      bandwidth: bytes a second of a device's memory.
      bandwidth_share: share of it that decoding reaches.
      rows: requests that are decoded together, at most.
      pool_share: of the memory that the weights leave, for cached KV.
      load: share of its time that an engine may be busy, so that nobody waits long.
      overhead: seconds of a request that are no products: text to ids, search, first dispatch.
    """

    flops: float
    utilisation: float
    memory: float
    bandwidth: float
    devices: int = 1
    bandwidth_share: float = 0.6
    rows: int = 32
    pool_share: float = 0.8
    load: float = 0.6
    overhead: float = 0.01


@dataclasses.dataclass(frozen=True)
class StorageTier:
    """A place for stored KV below the pool, the fastest first.

    Attributes:
      name: "host", "disk", "store".
      bytes: what it holds; None: everything.
      bandwidth: bytes a second towards the engine.
      latency: seconds until a read begins.
    """

    name: str
    bandwidth: float
    bytes: float | None = None
    latency: float = 0.0


@dataclasses.dataclass(frozen=True)
class PlanSettings:
    """All of a plan. Make one with ``load_plan``.

    Attributes:
      model: a TOML file as in configs/models, or a model directory.
      methods: names of methods, the one that is planned for first.
      dtype: that the model is served in, and its KV stored in; None: the model's own.
      stored: how KV is stored: "int8" or "native"; beside maps it is "native".
      maps: how maps of recurrent layers are stored: "float32", "bfloat16" or "int8".
      tiers: below the pool, the fastest first; the last one holds everything.
    """

    model: str
    corpus: CorpusSize
    queries: QueryLoad
    engine: EngineHardware
    tiers: tuple[StorageTier, ...]
    methods: tuple[str, ...] = ("turborag", "epic", "cacheblend", "fusionrag", "full_attention")
    dtype: DType | None = None
    stored: str = DEFAULT_FORM
    maps: MapForm = "float32"

    def __post_init__(self) -> None:
        for name in self.methods:
            if name not in METHODS:
                raise ConfigError(f"methods: {name!r}: expected one of {', '.join(METHODS)}")
        if not self.methods:
            raise ConfigError("methods: expected at least one")
        if self.stored not in STORED:
            raise ConfigError(f"stored={self.stored!r}: expected one of {', '.join(STORED)}")
        if self.maps not in MAP_FORMS.values():
            raise ConfigError(
                f"maps={self.maps!r}: expected one of {', '.join(MAP_FORMS.values())}"
            )
        if not self.tiers or self.tiers[-1].bytes is not None:
            raise ConfigError("tiers: the last one must hold everything: leave out its 'bytes'")
        for part in ("corpus", "queries", "engine"):
            _check(getattr(self, part), part)
        for number, tier in enumerate(self.tiers):
            _check(tier, f"tiers[{number}]")
        if self.queries.k > self.corpus.chunks:
            raise ConfigError(
                f"queries.k={self.queries.k}: expected at most corpus.chunks={self.corpus.chunks}"
            )


STORED = ("native", "int8")


def _check(part: Any, where: str) -> None:
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if value is None or isinstance(value, str):
            continue
        least = 0 if field.name in _FROM_ZERO else math.ulp(0.0)
        most = 1.0 if field.name in _AT_MOST_ONE else 1e30
        if not (math.isfinite(value) and least <= value <= most):
            expected = "0 or more" if least == 0 else "a number above 0"
            more = " and at most 1" if most == 1 else ""
            raise ConfigError(f"{where}.{field.name}={value}: expected {expected}{more}")


def load_plan(name: str, assignments: Sequence[str] = ()) -> tuple[PlanSettings, ModelConfig]:
    """The settings of a file, or of an installed one by its name, and the model that they name.

    ``assignments`` replace settings: ``queries.rate=20``. Raises ConfigError for what is no plan,
    and ModelError for what is no model.
    """
    path = config_path(name, "plans")
    if path is None:
        raise ConfigError(f"{name}: no such plan; name a .toml file as in configs/plans")
    values: Mapping[str, Any] = read_toml(path)
    for assignment in assignments:
        values = override(values, assignment)
    settings = build(PlanSettings, values, str(path))
    model = located(settings.model)
    if model.suffix == ".toml":
        config = config_from_dict(read_toml(model), settings.model)
    else:
        config = read_config(Path(model))
    if settings.dtype is not None:
        config = dataclasses.replace(config, dtype=settings.dtype)
    if config.recurrent is not None:
        if values.get("stored", "native") != "native":
            raise ConfigError(
                f"stored={settings.stored!r}: KV beside maps of recurrent layers is stored as it "
                "is; leave it out, or round the maps with maps='int8'"
            )
        settings = dataclasses.replace(settings, stored="native")
    for method in settings.methods:
        METHODS[method].check(config)
    return settings, config
