"""`jaxrag serve`: a model and its knowledge bases over HTTP."""

import contextlib
import dataclasses
import functools
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxrag.base.config import ModelOptions
from jaxrag.base.errors import ConfigError
from jaxrag.base.installed import installs
from jaxrag.cli.command import (
    SUMMARIES,
    Args,
    Parameter,
    command,
    fields,
    flag,
    from_fields,
    given_fields,
    take_table,
    value,
    values,
)
from jaxrag.cli.opening import model_of, open_bases
from jaxrag.cli.options import SECRET, distributed_options, model_options
from jaxrag.cli.processes import joined, led, plan_address
from jaxrag.cli.replicas import (
    ReplicaOptions,
    check_options,
    end_engines,
    engines,
    one_device,
    one_less,
    replicated,
)
from jaxrag.cli.waiting import counted
from jaxrag.server.options import ServerOptions

if TYPE_CHECKING:
    from jaxrag.library.knowledge_base import KnowledgeBase
    from jaxrag.models.model import Model
    from jaxrag.server.http.run import Server
    from jaxrag.server.settings import ServerSettings

_COMMON = "the of and is in a to"  # finds some passage of most English documents
_WORDS = 8
_ENGINES = "engines"  # what the names of a server's engines begin with, for who takes over
_BESIDE = {  # options of --config that no settings are
    *("distributed", "coordinator", "processes", "process_id", "plan", "take_over"),
    *(field.name for field in dataclasses.fields(ReplicaOptions)),
}
_NAMED = re.compile(r"([\w.-]+)=(.+)")


def run(args: Args) -> int:
    """Serve until a signal ends it."""
    with opened(args) as server:
        if server is not None:
            state = server.state
            counted(lambda: state.compiling if state.phase == "starting" else None)
            bases = state.knowledge_bases
            question = question_for(state.settings, state.model, bases)
            shown = banner(server.url, state.name, list(bases), question)
            server.run(lambda: print(shown, flush=True))
    return 0


@contextlib.contextmanager
def opened(args: Args) -> "Iterator[Server | None]":
    """The server that the arguments name, which takes no requests yet; closed at the end.

    None in a process of several that has followed the first, until that ended.
    """
    options = from_fields(ReplicaOptions, args)
    if options.replicas:
        check_options(options, args.distributed)
        # Theirs are the accelerators; prompts are made ready on the CPU.
        os.environ["JAXRAG_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "")
        os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        from jaxrag.engine.engine import Engine
        from jaxrag.server.http.handover import Predecessor
        from jaxrag.server.http.loading import while_loading
        from jaxrag.server.http.run import Server, address_of, bind
        from jaxrag.server.state.replicas import Replicas
        from jaxrag.server.state.state import make_state
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; {installs('serve')} does it") from None
    address = plan_address(args.plan, args.coordinator)
    if args.plan is not None and not args.distributed:
        raise ConfigError(f"--plan {args.plan} needs --distributed")
    if args.take_over and args.distributed:
        raise ConfigError("--take-over with --distributed: leave one of them out")
    with joined(args) as first:
        settings = settings_of(args)
        before = Predecessor(address_of(settings)[4]) if args.take_over else None
        theirs = "" if before is None else before.about.get(_ENGINES, "")
        with (
            contextlib.closing(before) if before is not None else contextlib.nullcontext(),
            bind(settings) if first and before is None else contextlib.nullcontext() as own,
            engines(settings, options, theirs) as found,
        ):
            bound = own if before is None else before.bound
            if before is not None and options.replicas:
                before.ended = functools.partial(end_engines, theirs, found.prefix)
            with contextlib.nullcontext() if own is None else while_loading(own):
                model = model_of(one_device(settings) if options.replicas else settings)
                bases = open_bases(settings, model)
            try:
                make = functools.partial(Replicas, routing=options.routing)
                state = make_state(settings, model, bases, make if options.replicas else Engine)
                with (
                    led(state, address) if args.distributed else contextlib.nullcontext(),
                    replicated(state, found, options, before)
                    if found.links
                    else contextlib.nullcontext(),
                ):
                    about = {_ENGINES: found.prefix}
                    room = functools.partial(one_less, state, found.prefix)
                    yield None if bound is None else Server(state, bound, about, before, room)
            finally:
                for base in bases.values():
                    base.close()


def settings_of(args: Args) -> "ServerSettings":
    """Those of --config, and of flags in front of them. Raises ConfigError."""
    from jaxrag.base.tables import build
    from jaxrag.server.settings import ServerSettings

    values: dict[str, Any] = {} if args.config is None else _read(args.config)
    values = {name: it for name, it in values.items() if name not in _BESIDE}
    where = args.config or "jaxrag serve"
    values |= given_fields(ServerOptions, args)
    if args.secret_file is not None:
        values["secret_file"] = args.secret_file
    named = {"path": args.model, "name": args.name}
    named = {name: value for name, value in named.items() if value is not None}
    named |= given_fields(ModelOptions, args)
    if args.distributed and "mesh" not in values.get("model", {}):
        named["mesh"] = args.mesh  # that of ``joined`` where no flag says one
    if named:
        values["model"] = {**values.get("model", {}), **named}
    if args.kb:
        values["knowledge_bases"] = dict(_named(kb) for kb in args.kb)
    return build(ServerSettings, values, where)


def _take_beside(ctx: click.Context, param: Parameter, config: str | None) -> str | None:
    """Read those options of --config that are no settings of the server."""
    if config is not None:
        beside = {name: it for name, it in _read(config).items() if name in _BESIDE}
        take_table(ctx, beside, f"--config {config}")
    return config


def _read(config: str) -> dict[str, Any]:
    """The table of --config: a file by its path, or one of configs/serve by name."""
    from jaxrag.base.installed import config_names, config_path
    from jaxrag.base.tables import read_toml

    path = config_path(config, "serve")
    if path is None:
        raise ConfigError(
            f"--config {config}: expected the path of a .toml file or one of "
            f"{', '.join(config_names('serve'))}"
        )
    return read_toml(path)


def _named(kb: str) -> tuple[str, str]:
    """Name and folder of --kb."""
    match = _NAMED.fullmatch(kb)
    return (match[1], match[2]) if match else (Path(kb).resolve().name, kb)


def question_for(
    settings: "ServerSettings", model: "Model", bases: "dict[str, KnowledgeBase]"
) -> str | None:
    """A question that works: of the settings, or the first words of a passage; None: none does."""
    if settings.questions:
        return settings.questions[0]
    found = [hit.text for base in list(bases.values())[:1] for hit in base.search(_COMMON, 1)]
    said = [" ".join(text.split()[:_WORDS]).rstrip(" .:;,") + "?" for text in found]
    readable = (it for it in (*said, "Who are you?") if not _unknown(model, it))
    return next(readable, None)


def _unknown(model: "Model", text: str) -> list[str]:
    return [""] if model.tokenizer is None else list(model.tokenizer.unknown_words(text))


def banner(url: str, name: str, bases: "Sequence[str]", question: str | None) -> str:
    """What is served where, and a command to try it."""
    shown = ", ".join(f"{name}@{base}" for base in bases) or "none"
    model = f"{name}@{bases[0]}" if bases else name
    served = f"jaxrag serves {name} at {url} (with knowledge bases: {shown}); its page: {url}/"
    if question is None:
        return f"{served}; try\n  curl {url}/v1/models"
    asked = {"model": model, "messages": [{"role": "user", "content": question}]}
    body = json.dumps(asked, ensure_ascii=False).replace("'", "\\u0027")
    return (
        f"{served}; try\n"
        f"  curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"
    )


COMMAND = command(
    "serve",
    run,
    SUMMARIES["serve"],
    "jaxrag serve --kb kb --kb laws=other/kb --port 8000",
    value(
        "--config",
        "FILE",
        "TOML with the keys of ServerSettings, or the name of an installed one: valley",
        is_eager=True,
        callback=_take_beside,
    ),
    values(
        "--kb",
        "[NAME=]DIR",
        "a knowledge base, and its name (that of its folder); repeatable, the first is "
        "asked where a chat names none",
    ),
    value("--name", None, "what clients call the model (the name of its folder)"),
    SECRET,
    fields(ServerOptions),
    model_options("the one that the first knowledge base remembers", kv=True),
    distributed_options(
        "one model on the devices of all processes (--mesh 1,1,N of N devices); the "
        "first answers HTTP and plans, the others take the same arguments"
    ),
    value(
        "--plan",
        "HOST[:PORT]",
        "with --distributed: where the first process listens for the others (the "
        "coordinator's host, any port)",
    ),
    flag(
        "--take-over",
        "take the place of the server that listens on this address: load, then answer "
        "all new connections, while it answers those that it has, and ends",
    ),
    fields(ReplicaOptions),
    basic="config kb model name host port data keys method k max-new-tokens plain replicas",
)
