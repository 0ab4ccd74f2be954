"""What is compared under load: one engine with other settings, never another loop."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrag.base.errors import ConfigError
from jaxrag.base.tables import build, table_from
from jaxrag.engine.state import EngineSettings
from jaxrag.reuse.methods import Method, method_named

REUSE, FULL = "turborag", "full_attention"
_INLINE: dict[str, Any] = {"lockstep": True}
_STATIC: dict[str, Any] = {"lockstep": True, "scheduler": {"static": True}}

# What each differs in from the engine's defaults. Inline: the engine's thread waits for every read.
ARMS: dict[str, dict[str, Any]] = {
    "static": {"engine": _STATIC},
    "static_full": {"engine": _STATIC, "method": FULL},
    "inline": {"engine": _INLINE},
    "asynchronous": {},
    "full": {"method": FULL},
    "fusionrag_inline": {"engine": _INLINE, "method": "fusionrag"},
    "fusionrag": {"method": "fusionrag"},
}


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to serve.

    Attributes:
      method: how stored KV is reused.
      recompute_ratio: of the chunk tokens; None: the method's own.
      link: bytes a second of the store; None: those of the run; 0: as fast as it is.
    """

    name: str
    method: str = REUSE
    recompute_ratio: float | None = None
    link: float | None = None
    engine: EngineSettings = dataclasses.field(default_factory=EngineSettings)

    def __post_init__(self) -> None:
        _ = self.resolved
        if self.link is not None and self.link < 0:
            raise ConfigError(f"link={self.link}: expected bytes a second, or 0 for no limit")

    @property
    def resolved(self) -> Method:
        """The method at its ratio."""
        method = method_named(self.method)
        ratio = self.recompute_ratio
        return method if ratio is None else method.with_ratio(ratio)


def arms_of(text: str) -> tuple[Arm, ...]:
    """Arms such as "static;asynchronous:engine.load_threads=4", separated by semicolons.

    Behind the colon stand fields of ``Arm``, and of the engine's settings behind ``engine.``.
    Raises ConfigError for an arm that is not among ARMS, an unknown field and one that is named
    twice.
    """
    arms = []
    for part in filter(None, text.split(";")):
        given = table_from(part, "--arms")
        kind = given.pop("name")
        if kind not in ARMS:
            raise ConfigError(f"--arms: {kind!r}: expected one of {', '.join(ARMS)}")
        values = {"name": part, **_merged(ARMS[kind], given)}
        arms.append(build(Arm, values, f"--arms: {part}"))
    if not arms or len({arm.name for arm in arms}) < len(arms):
        raise ConfigError(f"--arms {text!r}: expected some of {', '.join(ARMS)}, each once")
    return tuple(arms)


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """One table with the values of another, tables within tables likewise."""
    merged = dict(base)
    for key, value in changes.items():
        held = merged.get(key)
        merged[key] = _merged(held, value) if isinstance(held, dict) else value
    return merged
