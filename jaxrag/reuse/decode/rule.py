"""What a decode rule is: settings, what they need of a request, and how a token attends by them."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jaxrag.base import struct
from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import RequestError
from jaxrag.base.types import Array, HostArray, Partial
from jaxrag.kv.cache import PagePool
from jaxrag.kv.placement import ON_DEVICE, KVPlacement, check_owners
from jaxrag.models.rope import RopeTable
from jaxrag.reuse.attention_index import Spec
from jaxrag.reuse.decode.far import FarLayer, HostPrompt
from jaxrag.reuse.decode.footprint import Bytes, on_host
from jaxrag.reuse.decode.host_search import HostSearch
from jaxrag.reuse.decode.stored import Carried
from jaxrag.reuse.decode.view import PromptSlots, View

Positions = Literal["original", "cache"]


@dataclasses.dataclass(frozen=True)
class Observe:
    """Which queries of the prompt a rule wants kept from prefill: of the tokens that were run.

    Attributes:
      which: the newest ones, or evenly spread ones.
      count: how many; all where fewer were run.
      newest: of evenly spread ones so many are the newest, without a gap.
    """

    which: Literal["last", "strided"]
    count: int
    newest: int = 0

    def chosen(self, tokens: int) -> HostArray:
        """Which of so many tokens that were run: ascending int64, ``count`` or all of them."""
        count = min(self.count, tokens)
        newest = count if self.which == "last" else min(self.newest, count)
        spread = np.linspace(0, tokens - newest - 1, count - newest).round().astype(np.int64)
        return np.concatenate([spread, np.arange(tokens - newest, tokens)])


class PromptQueries(struct.PyTreeNode):
    """Queries of some prompt tokens, of every layer, before rotation.

    Attributes:
      queries: [L, B, W, N, H].
      positions: [B, W] int32; -1 where there is no query.
      sink_logits: [L, N] of the model, or None.
    """

    queries: Array
    positions: Array
    sink_logits: Array | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Prompts:
    """A request whose prompt is in the pool, a batch of one, before its first generated token.

    Attributes:
      rope: at least as long as the request's slots.
      on_pool: calls a function with the pool, K and V of all layers, where and when that may be
        read, and returns its result, which is to be on the host or new on the device.
      slots: of prompt and generated tokens.
      bank: the queries that ``DecodeRule.observe`` asked for; W is 0 where it asked for nothing.
      room: at most so many tokens are generated.
      number: as which ``host`` admitted it; None where the rule searches nothing.
      carried: the chunks that may have been stored with indexes.
      host: where indexes are searched; None where the rule searches nothing.
    """

    config: ModelConfig
    rope: RopeTable
    on_pool: Callable[[Callable[[PagePool], Any]], Any]
    slots: PromptSlots
    bank: PromptQueries
    room: int
    number: int | None = None
    carried: Sequence[Carried] = ()
    host: HostSearch | None = None


@dataclasses.dataclass(frozen=True)
class DecodeRule(abc.ABC):
    """How a generated token attends. A rule is its settings: frozen, comparable, hashable.

    Attributes:
      name: the key of DECODE_RULES; a field, so that a record of the settings says whose they are.
      sparse: does it leave keys out? Else tokens attend as in prefill, and nothing is begun.
      by_position: does it choose by position? Then it is refused where positions overlap.
      reads_far: does a token read anything outside the static pattern?
      by_kv_head: does a KV head choose for itself? Else all of them are to be in one place where
        the host chooses.
    """

    name: str = dataclasses.field(init=False)
    sparse: ClassVar[bool] = True
    by_position: ClassVar[bool] = True
    reads_far: ClassVar[bool] = True
    by_kv_head: ClassVar[bool] = True

    @property
    def observe(self) -> Observe | None:
        """Which queries of the prompt the rule needs; None: it needs none."""
        return None

    @property
    def searches(self) -> Spec | None:
        """The kind of index that the rule searches on the host; None: it needs none."""
        return None

    @property
    def placement(self) -> KVPlacement:
        """Where it is meant to have K and V: what its paper saves memory by."""
        return ON_DEVICE

    @property
    def static_pattern(self) -> tuple[int, int] | None:
        """First and newest tokens that the device keeps where K and V are in host memory.

        The newest one counts among them. None: the rule cannot attend there.
        """
        return None

    def check(self, config: ModelConfig) -> None:
        """Refuse a model that this rule cannot serve (RequestError)."""
        if config.sliding_window is not None:
            raise RequestError(
                f"decode rule {self.name!r}: layers of this model see {config.sliding_window} "
                f"tokens only (sliding window), there is nothing to leave out; use decode='dense'"
            )
        if config.shared_layers:
            raise RequestError(
                f"decode rule {self.name!r}: {config.shared_layers} layers of this model take K "
                "and V of others, of which it would choose anew; use decode='dense'"
            )
        if config.recurrent is not None:
            raise RequestError(
                f"decode rule {self.name!r}: layers of this model keep a state in place of KV, of "
                "which there is nothing to leave out; use decode='dense'"
            )
        for field, tokens in self.tokens().items():
            if tokens > config.max_positions:
                raise RequestError(
                    f"decode rule {self.name!r}: {field}={tokens} is larger than the model's "
                    f"context of {config.max_positions} tokens; choose less, or decode='dense'"
                )

    def check_placement(self, config: ModelConfig, placement: KVPlacement) -> None:
        """Refuse K and V where the rule does not read them (RequestError)."""
        layers = placement.value_layers
        if layers is not None:
            raise RequestError(
                f"decode rule {self.name!r} reads V of every layer on the device, and only the "
                f"first {layers} of this model have it there; use decode='topn:device_layers="
                f"{layers}', or load the model without value_layers"
            )
        if not placement.away:
            return
        if self.static_pattern is None:
            raise RequestError(
                f"decode rule {self.name!r} reads K and V on the device, and this model was loaded "
                "with kv='host'; use decode='retrieval', or load it without"
            )
        if config.sliding_window is not None:
            raise RequestError(
                f"layers of this model see {config.sliding_window} tokens only (sliding window), "
                "which kv='host' does not serve; load the model without it"
            )

    def far(self, prompt: HostPrompt) -> FarLayer | None:
        """What the host attends with in one layer: to all that ``static_pattern`` leaves out.

        Merged with attention to the static pattern it is what ``attend`` gives. None: nothing is
        read outside the pattern.
        """
        raise NotImplementedError(f"decode rule {self.name!r} has no host support")

    def check_mesh(
        self, config: ModelConfig, mesh: Mesh | None, placement: KVPlacement = ON_DEVICE
    ) -> None:
        """Refuse a mesh on which no one can choose for a KV head (RequestError)."""
        if self.searches is not None:
            check_owners(f"decode rule {self.name!r}", config, mesh)
        if mesh is not None and placement.away and not self.by_kv_head and mesh.shape["tensor"] > 1:
            raise RequestError(
                f"decode rule {self.name!r} chooses for all KV heads at once, and {placement} has "
                f"them in {mesh.shape['tensor']} parts; split rows instead of heads, with a mesh "
                "whose axis 'tensor' is 1, or use decode='retrieval'"
            )

    @abc.abstractmethod
    def tokens(self) -> dict[str, int]:
        """Settings that count tokens of the context, by name."""

    def bytes(
        self, config: ModelConfig, tokens: int, placement: KVPlacement | None = None
    ) -> Bytes:
        """What lies where behind a context of that many tokens.

        Args:
            placement: of K and V; None: as the rule is meant to have them.

        Raises RequestError for a placement that the rule cannot have.
        """
        placement = placement or self.placement
        self.check_placement(config, placement)
        beside = self.beside(config, tokens, placement)
        if placement.away:
            assert self.static_pattern is not None
            return on_host(config, tokens, sum(self.static_pattern)) + beside
        kv = placement.device_bytes(config, tokens), placement.host_bytes(config, tokens)
        return Bytes(*kv) + beside

    def beside(self, config: ModelConfig, tokens: int, placement: KVPlacement) -> Bytes:
        """What the rule keeps beside K and V, at most, and what it moves; see ``bytes``."""
        return Bytes()

    def begin(self, prompts: Prompts) -> Any:
        """What the rule carries from its first token on: a tree of arrays [L, B, ...], or None.

        Of most rules every layer for itself, as ``prepare`` makes it.
        """
        p = prompts
        return p.on_pool(
            lambda pool: prepare_layers(p.config, p.rope, pool, p.slots, p.bank, self, p.room)
        )

    def prepare(self, view: View, queries: Array, positions: Array, room: int) -> Any:
        """State of one layer once the prompt is in the pool; None, or a tree of arrays [B, ...].

        ``queries`` [B, W, N, H] and their ``positions`` [B, W] are what ``observe`` asked for (W is
        0 where it asked for nothing). At most ``room`` tokens are generated.
        """
        return None

    @abc.abstractmethod
    def attend(self, view: View, layer: Array, state: Any) -> tuple[Partial, Any]:
        """Attention of the newest token in one layer, float32, and the layer's state after it."""


@functools.partial(jax.jit, static_argnames=("config", "rule", "room"))
def prepare_layers(
    config: ModelConfig,
    rope: RopeTable,
    pool: PagePool,
    slots: PromptSlots,
    bank: PromptQueries,
    rule: DecodeRule,
    room: int,
) -> Any:
    """What ``rule.prepare`` makes of every layer, a tree of arrays [L, B, ...]; see ``Prompts``."""

    def layer(index: Array, queries: Array, sinks: Array | None) -> Any:
        view = dataclasses.replace(slots.view(config, rope, pool, index), sink_logits=sinks)
        return rule.prepare(view, queries, bank.positions, room)

    layers = jnp.arange(config.num_layers, dtype=jnp.int32)
    return jax.lax.map(lambda x: layer(*x), (layers, bank.queries, bank.sink_logits))


def highest(scores: Array, count: int) -> tuple[Array, Array]:
    """The ``count`` highest scores [..., S], best first, and where they are; all where S is less.

    Ties go to the earlier one.
    """
    best, at = lax.top_k(scores, min(count, scores.shape[-1]))
    return best, at


def require(rule: str, **counts: int) -> None:
    """RequestError unless every count is an integer of at least 1."""
    for field, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise RequestError(
                f"decode rule {rule!r}: {field}={value}: expected a positive integer"
            )


def require_zero_or_more(rule: str, **counts: int) -> None:
    """RequestError unless every count is an integer of at least 0."""
    for field, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise RequestError(f"decode rule {rule!r}: {field}={value}: expected 0 or more tokens")


def check_positions(rule: str, positions: str) -> None:
    """RequestError unless ``positions`` is a known scheme."""
    if positions not in get_args(Positions):
        raise RequestError(
            f"decode rule {rule!r}: positions={positions!r}: expected one of "
            f"{', '.join(get_args(Positions))}"
        )
