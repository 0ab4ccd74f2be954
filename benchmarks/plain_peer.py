"""The prompts of pasted passages put to vLLM, with its own prefix cache."""

import contextlib
import http.client
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from script import Result

from jaxrag.base.errors import RequestError
from jaxrag.base.types import HostArray
from jaxrag.measure.bench.serve_peer import HttpPeer, vllm
from jaxrag.models.model import Model

_KV_GIB = 4  # 54,000 tokens of a model of 100M parameters, more than a stream has
_TOLD = ("--enable-prompt-tokens-details",)  # how many tokens its prefix cache had


@contextlib.contextmanager
def started(python: str, model: Model, max_tokens: int) -> Iterator[HttpPeer | None]:
    """vLLM on the same weights until the block ends; None without a ``python`` that has it."""
    if not python:
        yield None
        return
    with tempfile.TemporaryDirectory() as name, vllm(
        python, model, Path(name), max_tokens, _TOLD, _KV_GIB
    ) as peer:  # fmt: skip
        asked(peer, np.arange(3, 67, dtype=np.int32), "warm-up")
        yield peer


def asked(peer: HttpPeer, ids: HostArray, salt: str) -> tuple[float, int]:
    """Seconds to the one token of an answer, and tokens of the prompt that were not computed.

    Raises RequestError where it refuses.
    """
    body = {
        "model": peer.model, "prompt": ids.tolist(), "max_tokens": 1, "temperature": 0,
        "ignore_eos": True, "cache_salt": salt,
    }  # fmt: skip
    sent, parts = json.dumps(body), urlsplit(peer.url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=600)
    try:
        begun = time.perf_counter()
        connection.request("POST", "/v1/completions", sent, {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        took = time.perf_counter() - begun
    finally:
        connection.close()
    if "error" in answer:
        raise RequestError(f"vLLM: {answer['error']}")
    details = answer["usage"].get("prompt_tokens_details") or {}
    return took, int(details.get("cached_tokens") or 0)


class Asked:
    """What it took over some prompts, one at a time."""

    def __init__(self, peer: HttpPeer, salt: str) -> None:
        """``salt``: prompts find what others of the same one have left, and nothing else."""
        self._peer, self._salt = peer, salt
        self._seconds = list[float]()
        self._cached = self._tokens = 0

    def ask(self, ids: HostArray) -> None:
        """The next prompt."""
        took, cached = asked(self._peer, ids, self._salt)
        self._seconds.append(took)
        self._cached += cached
        self._tokens += len(ids)

    def told(self, ours: list[float]) -> Result:
        """Share of tokens from its cache, seconds, and how many times as long as ``ours`` each."""
        theirs: Any = np.array(self._seconds)
        return {
            "of_prompts": round(self._cached / self._tokens, 4),
            "seconds": {f"p{at}": round(float(np.percentile(theirs, at)), 4) for at in (50, 95)},
            "reuse_sooner": round(float(np.median(theirs / np.array(ours))), 2),
        }
