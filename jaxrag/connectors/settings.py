"""What a user of the connector may set, and what speaks for its answers."""

import dataclasses

from jaxrag.base.errors import ConfigError
from jaxrag.connectors.manifest import Gate, Manifest
from jaxrag.kv.store.seal import read_secret


@dataclasses.dataclass(frozen=True)
class ConnectorSettings:
    """``kv_connector_extra_config``.

    Attributes:
      manifest: folder that `jaxrag kb connector` wrote.
      recognise: find stored parts in prompts that say nothing of them.
      require_gate: start only where something says that answers from stored parts are good.
      compute_last: chunks at the end of the parts that the engine computes.
      threads: that read parts.
      deadline: seconds that reading the parts of a request may take.
      host_bytes: the most that lies in memory of parts on their way, and after until needed.
      secret_file: of the secret that the chunks are sealed with.
      wanted_bytes: the most that the file of prompts with parts that the store lacked may have; 0
        notes none.
      untested_devices: start on others than CPUs.
    """

    manifest: str
    recognise: bool = True
    require_gate: bool = True
    compute_last: int = 0
    threads: int = 2
    deadline: float = 2.0
    host_bytes: int = 2 << 30
    secret_file: str | None = None
    wanted_bytes: int = 0
    untested_devices: bool = False

    def __post_init__(self) -> None:
        lowest = {"compute_last": 0, "threads": 1, "host_bytes": 1, "wanted_bytes": 0}
        for name, least in lowest.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)}: expected at least {least}")
        if not 0 < self.deadline < float("inf"):
            raise ConfigError(f"deadline={self.deadline}: expected seconds")

    def secret(self, sealed: str | None) -> bytes | None:
        """The secret. Raises ConfigError where there is none for chunks that are sealed."""
        if sealed is not None and self.secret_file is None:
            raise ConfigError(f"the chunks are sealed with secret {sealed}: set secret_file")
        return None if self.secret_file is None else read_secret(self.secret_file)


def verdict(manifest: Manifest, compute_last: int) -> Gate | None:
    """What speaks for these answers: training for blocks, or a gate of no fewer computed chunks."""
    return next((it for it in manifest.gates if it.compute_last <= compute_last), None)
