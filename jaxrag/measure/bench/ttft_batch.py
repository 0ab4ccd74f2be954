"""Time to first token of a batch: requests that come at one moment, as TurboRAG's table 4 has them.

Every request has chunks of its own. All go to the engine at once and ask for one token each; it
decides what runs together (``EngineSettings.together_flops``), and chunks of one request may be
read while another is prefilled. A batch has two times, both from the moment it comes: ``last``,
when every request has its first token, and ``mean``, that of the requests.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxrag.engine.engine import Engine
from jaxrag.engine.request import Prompt, Request
from jaxrag.kv.store import KVStore
from jaxrag.models.text.progress import followed
from jaxrag.reuse.methods import Method

WAYS = ("full", "disk", "pool")


def measure_batches(
    engine: Engine,
    store: KVStore,
    methods: tuple[Method, Method],
    prompts: Sequence[Prompt],
    forget: Callable[[Prompt], None],
    *,
    sizes: Sequence[int],
    repeats: int,
) -> list[dict[str, Any]]:
    """Batches of the first prompts, a row for each size, JSON-able.

    ``found`` counts chunks by where their KV was found, and ``compiled`` names programs that were
    compiled in timed rounds, of which there should be none.

    Args:
      engine: whose pool has room for the largest batch twice, as it is computed and as chunks.
      store: of the chunks; what it lacks is encoded and kept in a first round, which is not timed.
      methods: full attention, and the one that reuses.
      prompts: as many as the largest batch has.
      forget: drops the chunks of a prompt from the pool.
      repeats: timed rounds; in each, full prefill, chunks from the store and chunks from the pool
        take turns.
    """
    full, reuse = methods
    rows = []
    for size in followed(sizes, "ttft", "batch"):
        batch = prompts[:size]
        rounds: dict[str, list[list[float]]] = {way: [] for way in WAYS}
        row: dict[str, Any] = {"batch": size, "repeats": repeats, "flops": {}, "found": {}}
        before = Counter[str]()
        for at in range(repeats + 1):
            if at == 1:
                before = engine.compiled.copy()
            for way in WAYS:
                if way != "pool":
                    for prompt in batch:
                        forget(prompt)
                method = full if way == "full" else reuse
                requests = [Request(prompt, store, method, 1, rows=size) for prompt in batch]
                seconds, row["flops"][way], row["found"][way] = _first_tokens(engine, requests)
                rounds[way].append(seconds)
        row["compiled"] = sorted((engine.compiled - before).elements())
        for name, value in (("last", max), ("mean", statistics.mean)):
            timed = {way: [value(it) for it in rounds[way][1:]] for way in WAYS}
            median = {way: statistics.median(it) for way, it in timed.items()}
            row[name] = {
                "seconds": median,
                "best_seconds": {way: min(it) for way, it in timed.items()},
                "full_over_pool": median["full"] / median["pool"],
                "full_over_disk": median["full"] / median["disk"],
            }
        rows.append(row)
    return rows


def _first_tokens(
    engine: Engine, requests: Sequence[Request]
) -> tuple[list[float], int, dict[str, int]]:
    """Seconds to every first token, FLOPs of all, and chunks by where their KV was found."""
    seconds, flops, found = [0.0] * len(requests), 0, Counter[str]()
    start = time.perf_counter()
    for progress in engine.iterate(requests):
        if progress.error is not None:
            raise progress.error
        seconds[progress.number] = time.perf_counter() - start
        assert progress.outcome is not None  # of its only token
        flops += progress.outcome.flops
        found.update(it.where or it.how for it in progress.outcome.reuse if it.part != "prefix")
    return seconds, flops, dict(found)


def report_batches(result: dict[str, Any]) -> Iterator[str]:
    """The batches of a time-to-first-token result, as lines of a table."""
    batches = result["batches"]
    yield ""
    yield (
        f"batches of {batches['context']}-token contexts that come at one moment; milliseconds to "
        f"the last of the first tokens, and to their mean"
    )
    head = f"{'full':>9} {'pool':>8} {'disk':>8} {'full/pool':>9} {'full/disk':>9}"
    yield f"{'batch':>8} {head} {'mean:':>6} {head}"
    for row in batches["rows"]:
        cells = []
        for name in ("last", "mean"):
            ms = {way: 1000 * seconds for way, seconds in row[name]["seconds"].items()}
            cells.append(
                f"{ms['full']:>9.1f} {ms['pool']:>8.1f} {ms['disk']:>8.1f} "
                f"{row[name]['full_over_pool']:>9.1f} {row[name]['full_over_disk']:>9.1f}"
            )
        yield f"{row['batch']:>8} {cells[0]} {'':>6} {cells[1]}"
