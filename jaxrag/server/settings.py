"""The settings of a server: the keys of a TOML file, and flags in front of them."""

import dataclasses
import ipaddress
import re
from collections.abc import Mapping
from typing import Literal

from jaxrag.base.errors import ConfigError
from jaxrag.engine.state import EngineSettings
from jaxrag.server.options import ServerOptions

_COUNTS = (
    "k", "max_new_tokens", "max_answer_tokens", "rows", "classes", "max_body_bytes",
    "max_upload_bytes", "max_waiting", "max_waiting_tokens", "prepare_threads", "stream_events",
    "index_threads", "memory_bytes", "max_head_bytes", "max_bodies_bytes", "max_connections",
)  # fmt: skip
_SECONDS = (
    "max_seconds", "keepalive_seconds", "stall_seconds", "parse_seconds", "head_seconds",
    "body_seconds",
)  # fmt: skip
_HEADER = re.compile(r"[A-Za-z0-9-]{1,64}")
_CLASSES = 3  # of priority: interactive, default, batch


@dataclasses.dataclass(frozen=True)
class ServerSettings(ServerOptions):
    """How a server serves. ``tables.build`` makes it from a TOML file.

    Attributes:
      knowledge_bases: folders by the name that clients give; the first is asked where a chat names
        none.
      origins: of pages elsewhere that may ask from a browser, such as "https://chat.example".
      groups_header: in which a proxy names the groups of who asks, such as "X-Groups: sales,legal";
        only these documents are read then, and no more than the key allows. None: no header.
      trusted_proxies: addresses and networks that are believed in this; others get 403.
      index_threads: uploaded files that are indexed at once.
      parse_seconds: that one document of an upload may take to parse.
      grace_seconds: longer than any request takes; bytes of what was removed stay so long.
      memory_bytes: of KV of documents that come with requests, all tenants together.
      methods: presets that a request may name beside ``method``; None: all of them.
      decode_rules: rules that a request may name, as written here; None: all, with their default
        settings.
      max_answer_tokens: most tokens that a request may ask for.
      classes: of priority; 0 is served first.
      max_seconds: after which a request without a ``timeout`` fails, and the longest ``timeout``.
      max_body_bytes: largest body of a request that uploads nothing.
      max_upload_bytes: largest file that may be uploaded.
      max_waiting: most requests that wait for their first token.
      max_waiting_tokens: most prompt tokens of these; a request that finds none waiting is let in
        whatever its length.
      max_waiting_per_tenant: most requests of one tenant that wait; None: any number.
      prepare_threads: that retrieve and tokenise; a tenant has all but one of them at most, where
        there are keys.
      hold_seconds: for so long the status of a stream is held back, so that what fails before the
        first token is an HTTP error.
      keepalive_seconds: between two comments in a stream that has nothing to say.
      stream_events: most events of a stream that its reader is behind; then it is cut off.
      drain_seconds: what runs when the server is asked to end has so long to complete.
      stall_seconds: an engine with work that does nothing for so long is not healthy.
      watchdog_seconds: after which the process of such an engine ends itself; None: never.
      log_format: "text" or "json", one line an event.
      questions: examples that the page offers, about the first of the knowledge bases.
      engine: of the engine itself.
    """

    knowledge_bases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    origins: tuple[str, ...] = ()
    groups_header: str | None = None
    trusted_proxies: tuple[str, ...] = ()
    methods: tuple[str, ...] | None = None
    decode_rules: tuple[str, ...] | None = None
    max_answer_tokens: int = 4096
    classes: int = _CLASSES
    max_seconds: float = 300.0
    max_body_bytes: int = 16 << 20
    max_upload_bytes: int = 512 << 20
    max_waiting: int = 128
    max_waiting_tokens: int = 1 << 20
    max_waiting_per_tenant: int | None = None
    prepare_threads: int = 4
    hold_seconds: float = 2.0
    keepalive_seconds: float = 15.0
    stream_events: int = 1024
    drain_seconds: float = 30.0
    stall_seconds: float = 60.0
    watchdog_seconds: float | None = None
    log_format: Literal["text", "json"] = "text"
    questions: tuple[str, ...] = ()
    index_threads: int = 2
    parse_seconds: float = 120.0
    grace_seconds: float = 3600.0
    memory_bytes: int = 4 << 30
    engine: EngineSettings = dataclasses.field(default_factory=EngineSettings)

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: expected at least 1")
        for name in _SECONDS:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)}: expected seconds above 0")
        for name in ("hold_seconds", "drain_seconds", "grace_seconds"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)}: expected seconds, 0 or more")
        if self.plain_store_bytes and (self.plain == "off" or self.data is None):
            raise ConfigError(
                f"plain_store_bytes={self.plain_store_bytes}: KV of pasted passages is kept in the "
                "data folder; pass --plain passages and --data DIR too"
            )
        if self.max_bodies_bytes < self.max_body_bytes:
            raise ConfigError(
                f"max_bodies_bytes={self.max_bodies_bytes}: expected no less than max_body_bytes, "
                f"{self.max_body_bytes}"
            )
        if self.watchdog_seconds is not None and self.watchdog_seconds < self.stall_seconds:
            raise ConfigError(
                f"watchdog_seconds={self.watchdog_seconds}: expected no less than stall_seconds, "
                f"{self.stall_seconds:g}"
            )
        for proxy in self.trusted_proxies:
            try:
                ipaddress.ip_network(proxy)
            except ValueError as error:
                raise ConfigError(
                    f"trusted_proxies={proxy!r}: expected an address or network such as "
                    f"10.0.0.0/8 ({error})"
                ) from None
        if (self.groups_header is None) != (not self.trusted_proxies):
            raise ConfigError(
                f"groups_header={self.groups_header!r}, trusted_proxies={self.trusted_proxies}: "
                "set both, or none"
            )
        if self.groups_header is not None and not _HEADER.fullmatch(self.groups_header):
            raise ConfigError(
                f"groups_header={self.groups_header!r}: expected the name of a header, as X-Groups"
            )
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port={self.port}: expected 0 to 65535")
        if self.model.name is not None and (not self.model.name or "@" in self.model.name):
            raise ConfigError(f"model.name={self.model.name!r}: expected a name without @")
        for name in self.knowledge_bases:
            if not name or "@" in name or "/" in name:
                raise ConfigError(
                    f"knowledge base {name!r}: expected a name without @ and /, as in village=DIR"
                )
