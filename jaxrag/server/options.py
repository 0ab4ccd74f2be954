"""The settings of a server that are flags; ``settings.ServerSettings`` has those of its file."""

import dataclasses

from jaxrag.base.config import ModelOptions
from jaxrag.base.options import option, parse_bytes, parse_count
from jaxrag.serve.ask import Ask, Plain


@dataclasses.dataclass(frozen=True)
class ModelSettings(ModelOptions):
    """Which model is served, and where its weights and its KV are.

    Attributes:
      path: its directory; None: the one that the first knowledge base remembers.
      name: what clients call it; None: the name of its directory.
    """

    path: str | None = None
    name: str | None = None


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """Those that flags say too.

    Attributes:
      model: which model, and where it lies.
      host: address to listen on.
      port: port to listen on; 0: any that is free.
      data: folder for what clients upload; None: uploads are refused.
      keys: TOML file of the keys that are let in; None: anybody is.
      tier: folder of this machine for copies of the KV that is read; None: where the repository of
        a knowledge base is a URL, in the folder of the knowledge base.
      secret_file: file of the secret that seals the KV of the knowledge bases; None: of none.
      open_to_all: listen on an address that others can reach without asking for keys.
      method: a preset's name or a TOML file, where a request names none; None: by model and
        knowledge base, as ``generate`` chooses.
      decode: how generated tokens attend, where a request names no rule; None: the method's own.
      template: a prompt format's name or TOML file, of requests about no knowledge base; None: the
        model's own.
      k: chunks that are retrieved where a request does not say how many.
      plain: "passages": in chats that name no knowledge base and bring no documents, passages that
        were pasted into messages are read as blocks; their KV is kept.
      plain_ungated: have it so with weights that neither training nor a gate speaks for.
      plain_gate: file of a gate over recorded requests that was passed; ``method``, where none is
        named, is the gate's at the gate's ratio.
      passage_rules: how passages are found; a name of configs/passages, or a TOML file.
      plain_store_bytes: of KV of passages in the data folder, all tenants together; 0: it is in
        memory.
      max_new_tokens: bound of an answer whose request names none, or less where the context ends.
      rows: answers that are decoded together.
      allow_history_dependent: requests may use what depends on what the pool held before:
        ``prefix_cache`` and ``misses = "in_place"``.
      allowed_hosts: names, beside its own, by which clients may call the server; "*" is any.
      max_connections: most that are open at once; fewer where the process may not open so many
        files.
      max_head_bytes: of the request line and headers of a request.
      head_seconds: that these may take to come.
      body_seconds: that a body may take, and a second more for every 64 KiB; a client that does
        not read its answer is waited for as long.
      max_bodies_bytes: most bytes of bodies that are held at once, all requests together.
      warm_up: compile what requests will need before the server is ready.
    """

    model: ModelSettings = dataclasses.field(default_factory=ModelSettings)
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "0 takes any that is free", "N")
    data: str | None = option(None, "folder for uploads", "DIR", unset="none are taken")
    keys: str | None = option(None, "TOML of the keys that are let in", "FILE", unset="anybody")
    tier: str | None = option(
        None, "folder of this machine for copies of KV that lies elsewhere", "DIR",
        unset="in the knowledge base, of a repository with a URL",
    )  # fmt: skip
    secret_file: str | None = None
    open_to_all: bool = option(
        False,
        "listen on an address that others can reach though no key is asked for",
        flag="--open",
    )
    method: str | None = option(
        None, "where a request names none", "NAME", unset="as of `jaxrag ask`"
    )
    decode: str | None = option(None, "likewise", "RULE", unset="the method's own")
    template: str | None = option(
        None, "prompt format of requests about no knowledge base, or a .toml file", "NAME",
        unset="the model's own",
    )  # fmt: skip
    k: int = option(Ask.k, "chunks to retrieve", "N")
    plain: Plain = option(
        Ask.plain, "what is read as blocks in messages that bring no documents",
    )  # fmt: skip
    plain_ungated: bool = option(
        False, "--plain with weights that neither training nor a gate speaks for"
    )
    plain_gate: str | None = option(
        None, "what `jaxrag gate` wrote for these weights; its method and ratio read the passages",
        "FILE", unset="none",
    )  # fmt: skip
    passage_rules: str = option(
        Ask.passage_rules, "how passages are found, or a .toml file", "NAME"
    )
    plain_store_bytes: int = option(
        0, "of KV of passages in the data folder, for all tenants; 0: it is in memory", "BYTES",
        parse=parse_bytes,
    )  # fmt: skip
    max_new_tokens: int = option(256, "of an answer", "N", parse=parse_count)
    rows: int = option(8, "answers decoded together", "N")
    allow_history_dependent: bool = option(
        False, "requests may use what depends on earlier ones: prefix_cache, misses in place"
    )
    allowed_hosts: tuple[str, ...] = option(
        (), "a name by which the server may be called", "NAME", unset="its own",
        flag="--allowed-host", repeatable=True,
    )  # fmt: skip
    max_connections: int = option(512, "open at once", "N")
    max_head_bytes: int = option(1 << 15, "of a request's headers", "BYTES", parse=parse_bytes)
    head_seconds: float = option(10.0, "in which they are to come", "S")
    body_seconds: float = option(30.0, "for a body, and one more for each 64 KiB of it", "S")
    max_bodies_bytes: int = option(
        64 << 20, "of all bodies that are held", "BYTES", parse=parse_bytes
    )
    warm_up: bool = option(True, "compile when a request needs it, not before")
