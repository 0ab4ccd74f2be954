"""A model at work for a few seconds: finite, as transformers has it, how fast."""

import dataclasses
import importlib.util
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrag.base.errors import ModelError, RequestError
from jaxrag.base.types import HostArray
from jaxrag.engine.engine import engine_of
from jaxrag.engine.request import Prompt, Request
from jaxrag.kv.cache import PAGE
from jaxrag.measure.bench.peer import Peer
from jaxrag.models.memory import gib
from jaxrag.models.model import Model, load_model
from jaxrag.models.overview import Overview
from jaxrag.models.record import is_checkpoint
from jaxrag.reuse.methods import METHODS

PEER_LOGITS = Path(__file__).with_name("peer_logits.py")
LOGIT_TOKENS = 48  # of the prompt that is held against transformers
SAME = 1e-3  # of the largest logit: rounding of two float32 forwards stays far below
_SECONDS = 2.0  # that the longest timed prefill may take, about
_FIRST, _LONGEST = 64, 1024  # tokens of timed prompts
_NEW = 17  # tokens of a timed answer


@dataclasses.dataclass(frozen=True)
class Parity:
    """Logits in float32 beside those of transformers, over one prompt of random token ids.

    Attributes:
      peer: versions of what they were compared with.
      difference: the largest, absolute.
      largest: the largest absolute logit.
      first_choice: share of the tokens with the same first choice.
    """

    peer: dict[str, str]
    tokens: int
    difference: float
    largest: float
    first_choice: float

    @property
    def same(self) -> bool:
        """Is the difference that of rounding?"""
        return self.difference <= SAME * max(self.largest, 1.0)


class Speed(NamedTuple):
    """Tokens a second of one request under full attention, compiled before."""

    prompt_tokens: int
    prefill: float
    decode: float


@dataclasses.dataclass(frozen=True)
class Checked:
    """What was measured. Make one with ``check_model``.

    Attributes:
      parity: with transformers, or why it was not compared.
      speed: of prefill and of generation.
    """

    load_seconds: float
    parity: Parity | str
    speed: Speed

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        parity: Any = self.parity
        if isinstance(parity, Parity):
            parity = dataclasses.asdict(parity) | {"same": parity.same}
        speed = self.speed._asdict()
        return {"load_seconds": self.load_seconds, "parity": parity, "speed": speed}


def check_model(
    about: Overview,
    *,
    dtype: str | None = None,
    cache_tokens: int | None = None,
    mesh: Mesh | None = None,
    peer_python: str | None = None,
) -> Checked:
    """Load a model, with options of ``load_model``, and try it.

    Args:
      about: what it is understood as.
      peer_python: interpreter with torch and transformers; None: this one, where it has both.

    Raises ModelError for weights that do not fit or give logits that are no numbers, and
    RequestError where ``peer_python`` is named and does not answer.
    """
    start = time.perf_counter()
    model = load_model(about.path, mesh=mesh, dtype=dtype, cache_tokens=cache_tokens)
    load_seconds = time.perf_counter() - start
    ids = _random_ids(model, LOGIT_TOKENS)
    logits = np.asarray(model.logits(ids[None]))
    if not np.isfinite(logits).all():
        raise ModelError(
            f"{about.path}: its logits hold NaN or infinity in {model.config.dtype}; load it in a "
            "wider dtype, such as float32"
        )
    speed = _speed(model)
    return Checked(load_seconds, _parity(about, model, ids, peer_python), speed)


def _random_ids(model: Model, count: int) -> HostArray:
    draw = np.random.default_rng(0)
    size = min(count, model.config.max_positions)
    return draw.integers(0, model.config.vocab_size, size, dtype=np.int32)


def _parity(found: Overview, model: Model, ids: HostArray, peer_python: str | None) -> Parity | str:
    """Held against transformers, or why not."""
    if is_checkpoint(found.path):
        return "a jaxrag checkpoint, which transformers does not read; `jaxrag convert` it first"
    python = peer_python
    if python is None:
        if not all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
            return "transformers is not importable here; name an interpreter with --peer-python"
        python = sys.executable
    if model.config.dtype != "float32":
        need = 2 * 4 * found.files.parameters  # once here, once there
        free = found.memory.host_free
        if free is not None and found.memory.weights + need > free:
            return f"two sets of float32 weights take {gib(need)}, more than is free"
        model = load_model(found.path, dtype="float32", cache_tokens=PAGE)
    with jax.default_matmul_precision("highest"):
        ours = np.asarray(model.logits(ids[None])[0], np.float32)
    try:
        about, theirs = _ask_peer(python, found.path, ids)
    except RequestError as error:
        if peer_python is not None:
            raise
        return str(error)
    return Parity(
        peer=about,
        tokens=len(ids),
        difference=float(np.abs(ours - theirs).max()),
        largest=float(np.abs(theirs).max()),
        first_choice=float((ours.argmax(1) == theirs.argmax(1)).mean()),
    )


def _ask_peer(python: str, path: str, ids: HostArray) -> tuple[dict[str, str], HostArray]:
    """What the peer says of itself, and its logits [T, V]."""
    peer = Peer(python, PEER_LOGITS, str(Path(path).resolve()))
    try:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "logits.npy"
            peer.ask({"ids": ids.tolist(), "out": str(out)})
            return peer.about, np.load(out)
    finally:
        peer.close()


def _speed(model: Model) -> Speed:
    """Prompts twice as long each time, until one takes long enough to be timed."""
    engine, method = engine_of(model), METHODS["full_attention"]
    room = min(model.config.max_positions, engine.runner.num_pages * PAGE) - _NEW
    bound = max(min(_LONGEST, room), 1)
    length = min(_FIRST, bound)
    while True:
        ids = _random_ids(model, length)
        nothing = np.zeros(0, np.int32)
        request = Request(Prompt(nothing, (), ids), engine.memory, method, _NEW)
        for _ in range(2):  # the first compiles
            for progress in engine.iterate([request]):
                if progress.error is not None:
                    raise progress.error
                outcome = progress.outcome
        assert outcome is not None
        next_length = min(2 * length, bound)
        if next_length == length or 2 * outcome.prefill_seconds > _SECONDS:
            return Speed(length, length / outcome.prefill_seconds, 1 / outcome.per_token)
        length = next_length
