"""Whether first-token times tell a tenant what another has asked: a rank test (law 17).

`jaxrag serve` runs in a process of its own, with keys of two tenants. Each question comes with
documents of random words that no one has sent before. In every round, in random order, one tenant
times the first token of three of them:

- fresh: the other tenant asked other documents just before;
- other: the other tenant asked these very documents and this question just before;
- own: as fresh, but the tenant itself asked the same just before.

A Mann-Whitney test compares the times of ``other`` and of ``own`` with those of ``fresh``. The
first p-value should be no smaller than chance makes it, and the second, a control, should be
small: it shows that the test would notice KV that is reused. ``faster`` is the share of pairs in
which the time is shorter than a fresh one, half of it being chance. What was reused is counted as
well, and so is known exactly.

example: python benchmarks/tenants.py --rounds 200 --out benchmarks/results/tenants.json
"""

import contextlib
import dataclasses
import hashlib
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from scipy.stats import mannwhitneyu
from script import Result, run_script

from jaxrag.base.options import option
from jaxrag.measure.bench.serve_peer import end, until_ready
from jaxrag.measure.machine import describe

ROOT = Path(__file__).resolve().parents[1]
ARMS = ("fresh", "other", "own")
_ASKER, _OTHER = "asker", "other"
_WARM_UP = 10  # rounds that compile and do not count
_WORDS = [
    word
    for path in sorted((ROOT / "examples/village").glob("*.md"))
    for word in path.read_text(encoding="utf-8").split()
]


@dataclasses.dataclass(frozen=True)
class Options:
    """The questions."""

    rounds: int = option(200, "of three timed questions each", "N")
    documents: int = option(6, "of a question", "N")
    words: int = option(40, "of a document", "N")
    model: str = option(str(ROOT / "checkpoints/synthetic-0.8m/dual"), "its directory", "DIR")
    seed: int = option(0, "of words and order", "N")


def run(options: Options) -> Result:
    """Ask in rounds; JSON-able."""
    rng = random.Random(options.seed)
    times: dict[str, list[float]] = {arm: [] for arm in ARMS}
    reused = dict.fromkeys(ARMS, 0)
    with tempfile.TemporaryDirectory() as folder, _server(options, Path(folder)) as client:
        for number in range(_WARM_UP + options.rounds):
            for arm in rng.sample(ARMS, len(ARMS)):
                body, others = _question(rng, options), _question(rng, options)
                before = _ASKER if arm == "own" else _OTHER
                _ask(client, before, others if arm == "fresh" else body)
                seconds, tokens = _ask(client, _ASKER, body)
                if number >= _WARM_UP:
                    times[arm].append(seconds)
                    reused[arm] += tokens
    # The seconds that a machine takes are no part of a path.
    shown = dataclasses.asdict(options) | {"model": Path(options.model).name}
    return {
        "benchmark": "tenants",
        "options": shown,
        **compared(times, reused),
        "machine": describe(),
    }


def compared(times: dict[str, list[float]], reused: dict[str, int]) -> Result:
    """What a rank test says of the times of each arm, beside those of fresh questions."""
    found: Result = {}
    for arm, seconds in times.items():
        found[arm] = {"first_token": sorted(seconds), "reused_tokens": reused[arm]}
        if arm != ARMS[0]:
            test = mannwhitneyu(times[ARMS[0]], seconds, alternative="two-sided")
            found[arm] |= {
                "p": float(test.pvalue),
                "faster": float(test.statistic) / (len(times[ARMS[0]]) * len(seconds)),
            }
    return found


def report(result: Result) -> Iterator[str]:
    """A line for each arm."""
    for arm in ARMS:
        one = result[arm]
        seconds: Sequence[float] = one["first_token"]
        line = f"{arm}: median {1000 * seconds[len(seconds) // 2]:.2f} ms of {len(seconds)}, "
        line += f"{one['reused_tokens']} tokens reused"
        yield line + (f", p {one['p']:.3g}, faster in {one['faster']:.1%}" if "p" in one else "")


def _question(rng: random.Random, options: Options) -> dict[str, Any]:
    """A question over documents of random words."""
    texts = [" ".join(rng.choices(_WORDS, k=options.words)) for _ in range(options.documents)]
    asked = {"role": "user", "content": " ".join(rng.choices(_WORDS, k=8))}
    return {
        "messages": [asked], "documents": texts, "max_tokens": 1, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


def _ask(client: httpx.Client, tenant: str, body: dict[str, Any]) -> tuple[float, int]:
    """Seconds to the first event of the answer, and the tokens that it reused."""
    first, tokens = 0.0, 0
    headers = {"authorization": f"Bearer {_key(tenant)}"}
    start = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            choices = event.get("choices") or [{}]
            if not first and choices[0].get("delta", {}).get("content"):
                first = time.perf_counter() - start
            details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
            tokens = details.get("cached_tokens", tokens)
    return first or time.perf_counter() - start, tokens


def _key(tenant: str) -> str:
    return f"sk-{tenant}-0123456789"


@contextlib.contextmanager
def _server(options: Options, folder: Path) -> Iterator[httpx.Client]:
    """A server with the keys of two tenants, until the block ends."""
    keys = "".join(
        f'[[keys]]\nsha256 = "{hashlib.sha256(_key(tenant).encode()).hexdigest()}"\n'
        f'tenant = "{tenant}"\nread = ["*"]\n'
        for tenant in (_ASKER, _OTHER)
    )
    (folder / "keys.toml").write_text(keys, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / "messages.txt"
    command = [
        sys.executable, "-m", "jaxrag", "serve", "--model", options.model,
        "--keys", str(folder / "keys.toml"), "--port", str(port),
    ]  # fmt: skip
    with open(log, "wb") as messages:
        process = subprocess.Popen(
            command, stdout=messages, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        until_ready(process, url, log, "/ready")
        with httpx.Client(base_url=url, timeout=60) as client:
            yield client
    finally:
        end(process)


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, Options, run, report))
