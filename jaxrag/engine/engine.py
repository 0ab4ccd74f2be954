"""The engine of a model: requests of token ids in, new tokens out, and an account at the end."""

import dataclasses
import functools
import time
from collections.abc import Generator, Iterator, Sequence

from jaxrag.cache import PAGE
from jaxrag.decode import Account
from jaxrag.engine.decoding import SamplingRows, decode
from jaxrag.engine.mapping import RequestState, map_request, unmap
from jaxrag.engine.prefill import prefill_observed
from jaxrag.engine.request import FinishReason, Request, pages_of, reserved
from jaxrag.engine.reuse import PartReuse, account
from jaxrag.engine.runner import ModelRunner
from jaxrag.errors import RequestError
from jaxrag.models.flops import turborag_flops
from jaxrag.models.model import Model
from jaxrag.store import MemoryStore

INDEX_COUNTS = ("keys", "stored", "trained")  # of decode.Account

_MEMORY_BYTES = 4 << 30  # of KV of documents passed without a knowledge base


def engine_of(model: Model) -> "Engine":
    """The engine that serves a model: made at the first request, gone with the model."""
    if model.engine is None:
        model.engine = Engine(model)
    engine: Engine = model.engine
    return engine


class Engine:
    """Serves requests of one model, from one thread.

    Attributes:
      runner: the model on its device, with the page pool.
    """

    def __init__(self, model: Model) -> None:
        """Allocates nothing yet."""
        self.runner = ModelRunner(model)

    @functools.cached_property
    def memory(self) -> MemoryStore:
        """KV of documents that come without a knowledge base."""
        model = self.runner.model
        return MemoryStore(
            model.fingerprint,
            model.kv_layout,
            max_tokens=model.config.max_positions,
            max_bytes=_MEMORY_BYTES,
        )

    def check_fits(self, request: Request) -> None:
        """RequestError for a request that the pool could not hold if it held nothing else."""
        allocator = self.runner.cache.allocator
        need, there = pages_of([request]), allocator.num_pages
        if need > there:
            raise RequestError(
                f"the prompt of {request.prompt.num_tokens} tokens and its answer need "
                f"{need * PAGE} tokens of cache, the pool has {there * PAGE}; raise cache_tokens "
                "or use fewer chunks"
            )

    def batches(self, requests: Sequence[Request], batch_size: int) -> Iterator[list[int]]:
        """Indices of the requests that run together; all of them once, the shortest prompts first.

        A batch is smaller than ``batch_size`` where the pool has no room for more: what other
        batches hold at this moment is not counted in.
        """
        waiting = sorted(range(len(requests)), key=lambda i: requests[i].prompt.num_tokens)
        while waiting:
            room = self.runner.cache.allocator.num_available
            size = min(batch_size, len(waiting))
            while size > 1 and pages_of([requests[i] for i in waiting[:size]]) > room:
                size -= 1
            yield waiting[:size]
            waiting = waiting[size:]

    def run(self, requests: Sequence[Request], block: int) -> "Batch":
        """Serve requests of one method and ``max_new_tokens`` together, ``block`` tokens a step."""
        return Batch(self.runner, requests, block)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one request took, once it is done.

    Attributes:
      load_seconds: until its chunks' KV was on its way into the pool: storage and encoding.
      prefill_seconds: from there until the first token was on the host. Requests of one batch share
        both.
      per_token: mean seconds of the other tokens; 0 where there are none.
      flops: to the first token, TurboRAG appendix C: prefill with what is recomputed, the
        selector's own passes, and encoding on the fly.
      reuse: of the prefix and of every chunk: what was reused, how, and why not.
      indexes: of a decode rule that searches some, of all requests of the batch, summed over layers
        and KV heads: keys indexed, those of them in indexes that were stored with their chunks, and
        indexes that were trained for the question; empty for other rules.
      notes: on chunks that were not found, and on indexes that were not used.
    """

    load_seconds: float
    prefill_seconds: float
    per_token: float
    flops: int
    reuse: list[PartReuse]
    indexes: dict[str, int]
    notes: list[str]


@dataclasses.dataclass
class Row:
    """One answer of a batch as it grows.

    Attributes:
      new: token ids of the last step, without the one that ended it.
      finish_reason: "stop" after a token of ``eos_ids`` or ``Batch.stop``, "length" at the bound.
      num_tokens: how many there are in all.
    """

    request: Request
    new: list[int] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_tokens: int = 0

    def extend(self, ids: Sequence[int]) -> None:
        """Take what was sampled, up to the end."""
        self.new = []
        for token_id in ids:
            if self.finish_reason is not None:
                return
            if token_id in self.request.eos_ids:
                self.finish_reason = "stop"
                return
            self.new.append(token_id)
            self.num_tokens += 1
            if self.num_tokens == self.request.max_new_tokens:
                self.finish_reason = "length"


class Batch:
    """Requests that are prefilled and decoded together; iterate for their rows after every step.

    Attributes:
      outcomes: one a request, once the iteration is over.
    """

    def __init__(self, runner: ModelRunner, requests: Sequence[Request], block: int) -> None:
        """Nothing runs before the first step is asked for."""
        if len({(r.method, r.max_new_tokens) for r in requests}) != 1:
            raise RequestError("requests of one batch share their method and max_new_tokens")
        self._runner = runner
        self._requests = requests
        self._block = block
        self._rows = [Row(request) for request in requests]
        self.outcomes: list[Outcome] = []

    def stop(self, index: int) -> None:
        """The request at this index wants no more tokens."""
        self._rows[index].finish_reason = "stop"

    def __iter__(self) -> Generator[list[Row]]:
        """The rows after the first token, then after every block, until all are finished."""
        runner, block = self._runner, self._block
        method = self._requests[0].method
        reserve = reserved(self._requests[0].max_new_tokens, block)
        rule = method.decode
        start = time.perf_counter()
        states: list[RequestState] = []
        host = None if rule.searches is None else runner.host_search
        numbers = [] if host is None else [host.admit() for _ in self._requests]
        try:
            for request in self._requests:
                states.append(map_request(runner, request, reserve))
            loaded_at = time.perf_counter()
            observe = rule.observe if reserve else None  # one token needs no rule
            prefilled = prefill_observed(runner, states, observe)
            rows = prefilled.logits.shape[0]
            sampling = SamplingRows.of([r.sampling for r in self._requests], rows)
            first_at, decoded = 0.0, 0
            blocks = decode(runner, states, prefilled, sampling, block, rule, reserve, numbers)
            for ids in blocks:
                if not first_at:
                    first_at = time.perf_counter()
                else:
                    decoded += block
                for row, new in zip(self._rows, ids.tolist(), strict=False):
                    row.extend(new)
                yield self._rows
                if all(row.finish_reason for row in self._rows):
                    break
            end = time.perf_counter()
            searched = Account() if host is None else host.account_of(numbers)
        finally:
            if host is not None:
                host.release(numbers)
            for state in states:
                unmap(runner, state)
            if runner.cache.lost:
                runner.forget_cache()
        self.outcomes = [
            Outcome(
                load_seconds=loaded_at - start,
                prefill_seconds=first_at - loaded_at,
                per_token=(end - first_at) / decoded if decoded else 0.0,
                flops=_flops(runner.model, request, state),
                reuse=account(method, state, request.encoders),
                indexes={} if host is None else {n: getattr(searched, n) for n in INDEX_COUNTS},
                notes=[
                    *(note for part in state.loaded for note in part.notes),
                    *(f"decode rule {rule.name!r}: {note}" for note in searched.notes),
                ],
            )
            for request, state in zip(self._requests, states, strict=True)
        ]


def _flops(model: Model, request: Request, state: RequestState) -> int:
    flops = turborag_flops(model.config, len(state.ids), request.prompt.num_tokens)
    flops += 0 if state.choice is None else state.choice.flops
    for part in state.loaded:
        flops += sum(turborag_flops(model.config, *run) for run in part.runs)
    return flops
