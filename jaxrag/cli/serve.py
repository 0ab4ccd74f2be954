"""`jaxrag serve`: a model and its knowledge bases over HTTP."""

import argparse
import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrag.cli.options import (
    add_command,
    add_model,
    load,
    parse_count,
)
from jaxrag.errors import ConfigError, KnowledgeBaseError

if TYPE_CHECKING:
    from jaxrag.knowledge_base import KnowledgeBase
    from jaxrag.models.model import Model
    from jaxrag.server.settings import ServerSettings

_NAMED = re.compile(r"([\w.-]+)=(.+)")
_OF_MODEL = ("dtype", "mesh", "cache_tokens", "kernels", "value_layers", "max_host_bytes", "kv")
_FLAGS = (
    "host", "port", "data", "keys", "method", "decode", "k", "max_new_tokens", "rows",
)  # fmt: skip


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = add_command(
        commands,
        "serve",
        "serve a model and its knowledge bases over HTTP, as OpenAI's clients ask",
        "jaxrag serve --kb kb --kb laws=other/kb --port 8000",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="TOML with the keys of ServerSettings, or the name of an installed one: village",
    )
    parser.add_argument(
        "--kb",
        action="append",
        default=[],
        metavar="[NAME=]DIR",
        help="a knowledge base, and its name (that of its folder); repeatable, the first is asked "
        "where a chat names none",
    )
    parser.add_argument("--name", help="what clients call the model (the name of its folder)")
    parser.add_argument("--host", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, metavar="N", help="0 takes any that is free (8000)")
    parser.add_argument("--data", metavar="DIR", help="folder for uploads (none are taken)")
    parser.add_argument("--keys", metavar="FILE", help="TOML of the keys that are let in (anybody)")
    parser.add_argument(
        "--open",
        action="store_true",
        help="listen on an address that others can reach though no key is asked for",
    )
    parser.add_argument("--method", help="where a request names none (turborag)")
    parser.add_argument("--decode", metavar="RULE", help="likewise (the method's own)")
    parser.add_argument("--k", type=int, metavar="N", help="chunks to retrieve (5)")
    parser.add_argument(
        "--max-new-tokens", type=parse_count, metavar="N", help="of an answer (256)"
    )
    parser.add_argument("--rows", type=int, metavar="N", help="answers decoded together (8)")
    parser.add_argument(
        "--allow-history-dependent",
        action="store_true",
        help="requests may use what depends on earlier ones: prefix_cache, misses in place",
    )
    parser.add_argument(
        "--no-warm-up", action="store_true", help="compile when a request needs it, not before"
    )
    add_model(parser, required=False, text="(the one that the first knowledge base remembers)")
    parser.add_argument("--kv", choices=("device", "host"), help="where K and V are")
    parser.set_defaults(run=run, kernels=None)


def run(args: argparse.Namespace) -> int:
    """Serve until told to end."""
    try:
        from jaxrag.server.run import Server, bind, url_of
        from jaxrag.server.state import make_state
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed; pip install 'jaxrag[serve]' does it"
        ) from None
    settings = settings_of(args)
    with bind(settings) as bound:
        model = _model(settings)
        bases = open_bases(settings, model)
        try:
            server = Server(make_state(settings, model, bases), bound)
            question = next(iter(settings.questions), "Who are you?")
            told = banner(url_of(bound), server.state.name, list(bases), question)
            server.run(lambda: print(told, flush=True))
        finally:
            for base in bases.values():
                base.close()
    return 0


def settings_of(args: argparse.Namespace) -> "ServerSettings":
    """Those of --config, and of flags in front of them. Raises ConfigError."""
    from jaxrag.server.settings import ServerSettings
    from jaxrag.tables import build

    values: dict[str, Any] = {} if args.config is None else _read(args.config)
    where = args.config or "jaxrag serve"
    given = {name: getattr(args, name) for name in _FLAGS}
    values |= {name: value for name, value in given.items() if value is not None}
    of_model = {name: getattr(args, name) for name in _OF_MODEL}
    of_model |= {"path": args.model, "name": args.name}
    named = {name: value for name, value in of_model.items() if value is not None}
    if named:
        values["model"] = {**values.get("model", {}), **named}
    if args.allow_history_dependent:
        values["allow_history_dependent"] = True
    if args.open:
        values["open_to_all"] = True
    if args.no_warm_up:
        values["warm_up"] = False
    if args.kb:
        values["knowledge_bases"] = dict(_named(kb) for kb in args.kb)
    return build(ServerSettings, values, where)


def _read(config: str) -> dict[str, Any]:
    """The table of --config: a file by its path, or one of configs/serve by name."""
    from jaxrag.installed import config_names, config_path
    from jaxrag.tables import read_toml

    path = config_path(config, "serve")
    if path is None:
        raise ConfigError(
            f"--config {config}: expected the path of a .toml file or one of "
            f"{', '.join(config_names('serve'))}"
        )
    return read_toml(path)


def _named(kb: str) -> tuple[str, str]:
    """Name and folder of --kb."""
    found = _NAMED.fullmatch(kb)
    return (found[1], found[2]) if found else (Path(kb).resolve().name, kb)


def _model(settings: "ServerSettings") -> "Model":
    """The model of the settings, or that of the first knowledge base."""
    from jaxrag.knowledge_base import KnowledgeBase
    from jaxrag.methods import method_named

    method = method_named(settings.method)
    given = settings.model
    path, dtype = given.path, given.dtype
    for folder in list(settings.knowledge_bases.values())[:1]:
        with KnowledgeBase.open(folder) as remembered:
            path = path or remembered.model_path
            dtype = dtype or remembered.store.layout.dtype
        if given.path is None and (path is None or not Path(path).is_dir()):
            raise KnowledgeBaseError(
                f"{folder} was made with the model in {path}, which is not there; pass --model DIR"
            )
    if path is None:
        raise ConfigError("nothing to serve: pass --kb DIR, or --model DIR")
    return load(argparse.Namespace(**dataclasses.asdict(given)), path, dtype, method)


def open_bases(settings: "ServerSettings", model: "Model") -> "dict[str, KnowledgeBase]":
    """The knowledge bases of the settings, by name."""
    from jaxrag.knowledge_base import KnowledgeBase

    opened: dict[str, KnowledgeBase] = {}
    try:
        for name, folder in settings.knowledge_bases.items():
            if not Path(folder).is_dir():
                raise KnowledgeBaseError(
                    f"{folder} is no folder; make it with `jaxrag ingest PATH... --kb {folder}`"
                )
            opened[name] = KnowledgeBase.open(folder, model=model)
    except BaseException:
        for base in opened.values():
            base.close()
        raise
    return opened


def banner(url: str, name: str, bases: "Sequence[str]", question: str) -> str:
    """What is served where, and a command to try it."""
    shown = ", ".join(f"{name}@{base}" for base in bases) or "none"
    model = f"{name}@{bases[0]}" if bases else name
    asked = {"model": model, "messages": [{"role": "user", "content": question}]}
    body = json.dumps(asked, ensure_ascii=False).replace("'", "\\u0027")
    return (
        f"jaxrag serves {name} at {url} (with knowledge bases: {shown}); try\n"
        f"  curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"
    )
