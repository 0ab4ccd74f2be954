"""Requests and iterations as bytes, for the processes of one model: JSON, with arrays as base64.

Nothing is called or imported by name: only what TYPES lists can come out.
"""

import base64
import binascii
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrag.base.errors import EngineError, JaxragError
from jaxrag.base.guide import Guide
from jaxrag.engine.request import Prompt, Request
from jaxrag.engine.sampling_params import SamplingParams
from jaxrag.kv.store import KVStore
from jaxrag.reuse.attention_index import INDEXES
from jaxrag.reuse.attention_index.document import Indexing
from jaxrag.reuse.decode import DECODE_RULES
from jaxrag.reuse.methods import Method
from jaxrag.reuse.select import SELECTORS

MAX_BYTES = 256 << 20  # of one iteration
TYPES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Prompt,
        Method,
        SamplingParams,
        Guide,
        Indexing,
        *SELECTORS.values(),
        *DECODE_RULES.values(),
        *INDEXES.values(),
    )
}
_NDIM = {"int32": (1,), "float32": (2, 5)}  # of arrays: token ids, and vectors of a primer, or KV
_FIELDS = {field.name for field in dataclasses.fields(Request)} - {"store"}


@dataclasses.dataclass(frozen=True)
class Submit:
    """A request begins.

    Attributes:
      added: when, by the leader's clock.
      store: its name among those that every process has.
    """

    number: int
    added: float
    store: str
    request: Request


@dataclasses.dataclass(frozen=True)
class Abort:
    """Nothing more is wanted of a request."""

    number: int


@dataclasses.dataclass(frozen=True)
class Stop:
    """No more tokens are wanted of a request."""

    number: int


@dataclasses.dataclass(frozen=True)
class Forget:
    """The pool is made anew."""


@dataclasses.dataclass(frozen=True)
class Loaded:
    """Every process has read its part of a batch of chunks."""

    number: int


Command = Submit | Abort | Stop | Forget | Loaded
_COMMANDS: dict[str, type[Any]] = {
    "abort": Abort,
    "stop": Stop,
    "forget": Forget,
    "loaded": Loaded,
}


@dataclasses.dataclass(frozen=True)
class EngineIteration:
    """What every process does next: one iteration of the engine's loop.

    Attributes:
      number: counts the iterations.
      now: its time, by the leader's clock.
      commands: that are carried out before it.
      rests: there is nothing to do; the batches' memory goes.
    """

    number: int
    now: float
    commands: tuple[Command, ...] = ()
    rests: bool = False


def iteration_bytes(iteration: EngineIteration) -> bytes:
    """An iteration as it is sent. Raises EngineError for one above MAX_BYTES."""
    commands = [_command_table(command) for command in iteration.commands]
    table = {"iteration": iteration.number, "now": iteration.now, "rests": iteration.rests}
    data = json.dumps(table | {"commands": commands}, separators=(",", ":")).encode()
    if len(data) > MAX_BYTES:
        raise EngineError(f"an iteration of {len(data)} bytes: at most {MAX_BYTES} are sent")
    return data


def iteration_of(data: bytes, stores: Mapping[str, KVStore]) -> EngineIteration:
    """An iteration as it was sent; ``stores``: by name. Raises EngineError for anything else."""
    try:
        table = json.loads(data)
        commands = tuple(_command(command, stores) for command in table["commands"])
        return EngineIteration(
            int(table["iteration"]), float(table["now"]), commands, bool(table["rests"])
        )
    except (ValueError, KeyError, TypeError, RecursionError, JaxragError) as error:
        raise EngineError(f"the leader sent no iteration: {' '.join(str(error).split())}") from None


def _command_table(command: Command) -> dict[str, Any]:
    if not isinstance(command, Submit):
        [name] = (name for name, kind in _COMMANDS.items() if isinstance(command, kind))
        return {"command": name, **dataclasses.asdict(command)}
    return {
        "command": "submit",
        "number": command.number,
        "added": command.added,
        "store": command.store,
        "request": request_table(command.request),
    }


def _command(table: dict[str, Any], stores: Mapping[str, KVStore]) -> Command:
    kind = table.pop("command")
    if kind != "submit":
        made: Command = _COMMANDS[kind](**{name: int(value) for name, value in table.items()})
        return made
    name = table["store"]
    request = request_of(table["request"], stores[name])
    return Submit(int(table["number"]), float(table["added"]), name, request)


def request_table(request: Request) -> dict[str, Any]:
    """A request for JSON, without its store."""
    return {name: _plain(getattr(request, name)) for name in sorted(_FIELDS)}


def request_of(table: Mapping[str, Any], store: KVStore) -> Request:
    """The request that a table was made of.

    Raises KeyError, TypeError, ValueError or JaxragError for a table that is of none.
    """
    fields = {name: _value(table[name]) for name in _FIELDS}
    fields["eos_ids"] = frozenset(fields["eos_ids"])
    return Request(store=store, **fields)


def _plain(value: Any) -> Any:
    """A value of a request for JSON. Raises TypeError for what no request holds."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, np.ndarray):
        if value.ndim not in _NDIM.get(value.dtype.name, ()):
            raise TypeError(f"an array of {value.dtype} {value.shape} in a request")
        held = base64.b64encode(value.tobytes()).decode()
        return {value.dtype.name: held, "shape": list(value.shape)}
    if isinstance(value, tuple | list):
        return [_plain(element) for element in value]
    if isinstance(value, frozenset):
        return sorted(value)
    if TYPES.get(type(value).__name__) is not type(value):
        raise TypeError(f"a {type(value).__name__} in a request")
    fields = {
        it.name: _plain(getattr(value, it.name)) for it in dataclasses.fields(value) if it.init
    }
    return {"is": type(value).__name__, **fields}


def _value(plain: Any) -> Any:
    """What ``_plain`` was given, with every sequence a tuple."""
    if isinstance(plain, list):
        return tuple(_value(element) for element in plain)
    if not isinstance(plain, dict):
        return plain
    for dtype in _NDIM.keys() & plain.keys():
        try:
            flat = np.frombuffer(base64.b64decode(plain[dtype], validate=True), dtype)
            return flat.reshape(plain["shape"])
        except binascii.Error as error:
            raise ValueError(str(error)) from None
    fields = {name: _value(held) for name, held in plain.items() if name != "is"}
    return TYPES[plain["is"]](**fields)
