"""A peer that serves the same weights over HTTP: vLLM in an environment of its own, or any URL.

The peer gets a copy of the model in Hugging Face's format, with a tokenizer of one word a token, so
that every token that it generates is an event with text. Its prefix cache is on. Prompts are
token ids; a salt that all requests of one run share keeps what earlier runs left in its prefix
cache out of this one.
"""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import tokenizers
from tokenizers import models

from jaxrag.base.errors import RequestError
from jaxrag.measure.bench.serve_workload import AskedRequest
from jaxrag.models.export import export_hf
from jaxrag.models.model import Model
from jaxrag.models.text import byte_level

FLAGS = ("--enforce-eager", "--enable-prefix-caching")
_START_SECONDS = 600.0  # 30 on an idle machine
_STOP_SECONDS = 20.0


class HttpPeer:
    """A server that answers OpenAI's completions.

    Attributes:
      model: the name that it serves the model under.
      about: what it says of itself, JSON-able.
    """

    def __init__(self, url: str, about: Mapping[str, Any]) -> None:
        """Ask what it serves. Raises RequestError where none answers."""
        self.url = url.rstrip("/")
        if urlsplit(self.url).scheme != "http" or not urlsplit(self.url).hostname:
            raise RequestError(f"--peer {url}: expected http://HOST:PORT")
        try:
            self.model = str(self._get("/v1/models")["data"][0]["id"])
        except (OSError, http.client.HTTPException, LookupError, ValueError) as error:
            raise RequestError(
                f"--peer {url}: it does not answer /v1/models as a server of one model "
                f"({type(error).__name__}: {error})"
            ) from None
        with contextlib.suppress(OSError, http.client.HTTPException, LookupError, ValueError):
            about = {**about, "version": self._get("/version")["version"]}
        self.about = dict(about)

    def body(self, asked: AskedRequest, salt: str) -> dict[str, Any]:
        """The request for exactly so many greedy tokens, streamed."""
        prompt = asked.prompt
        ids = np.concatenate((prompt.prefix, *prompt.chunks, prompt.final))
        return {
            "model": self.model,
            "prompt": ids.tolist(),
            "max_tokens": asked.tokens,
            "min_tokens": asked.tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "cache_salt": salt,
        }

    def _get(self, path: str) -> Any:
        """What it answers to a GET, read as JSON."""
        return json.loads(self.read(path))

    def read(self, path: str) -> bytes:
        """What it answers to a GET; OSError for a status that is none of success."""
        return read(self.url + path, 10)


def read(url: str, seconds: float) -> bytes:
    """What a server answers to a GET, in so many seconds; OSError for no success."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # by no proxy
    with opener.open(url, timeout=seconds) as answer:
        return bytes(answer.read())


def write_model(model: Model, directory: Path) -> None:
    """The weights in Hugging Face's format, and a tokenizer whose words name the ids."""
    export_hf(directory, model.params, model.config)
    words = {f"t{n}": n for n in range(model.config.vocab_size)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(words, unk_token="t0"))
    byte_level.save(tokenizer, directory, {"tokenizer_class": "PreTrainedTokenizerFast"})


@contextlib.contextmanager
def vllm(
    python: str,
    model: Model,
    folder: Path,
    max_tokens: int,
    more: Sequence[str] = (),
    kv_gib: int = 1,
) -> Iterator[HttpPeer]:
    """vLLM's OpenAI server on a copy of the model, until the block ends.

    Args:
      python: the interpreter of an environment that has vLLM.
      folder: for the copy, unless it holds it as "model", and the server's messages.
      max_tokens: of a prompt and its answer.
      more: further arguments of its command.
      kv_gib: for KV, on a CPU.

    Raises:
      RequestError: it cannot be run, or ended before it answered.
    """
    if not (folder / "model").exists():
        write_model(model, folder / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "model"),
        "--served-model-name", "model", "--host", "127.0.0.1", "--port", str(port),
        "--dtype", model.config.dtype, "--max-model-len", str(max_tokens), *FLAGS,
        *more,
    ]  # fmt: skip
    cores = str(len(os.sched_getaffinity(0)))
    # All cores, as ours has them: its own choice would leave one of them to its scheduler.
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib), "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": cores,
        "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    environment.pop("PYTHONPATH", None)
    log = folder / "messages.txt"
    with open(log, "wb") as messages:
        try:
            process = subprocess.Popen(
                command,
                stdout=messages,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=folder,
                start_new_session=True,  # it starts processes of its own
            )
        except OSError as error:
            raise RequestError(f"--peer-python {python}: cannot be run ({error})") from None
    try:
        url = f"http://127.0.0.1:{port}"
        until_ready(process, url, log)
        flags = " ".join((*FLAGS, f"--max-model-len {max_tokens}"))
        yield HttpPeer(url, {"name": "vllm", "flags": flags, "threads": int(cores)})
    finally:
        end(process)


def until_ready(
    process: "subprocess.Popen[bytes]", url: str, log: Path, path: str = "/health"
) -> None:
    """Wait until the server says 200 at ``path``. RequestError where it ends before, or never does.

    What it wrote to ``log`` is quoted then.
    """
    until = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < until:
        with contextlib.suppress(OSError, http.client.HTTPException):
            read(url + path, 5)
            return
        time.sleep(0.25)
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-5:]
    ended = process.returncode
    why = f"did not answer in {_START_SECONDS:.0f} s" if ended is None else f"ended with {ended}"
    raise RequestError(f"the server {why}; it said: {' | '.join(said)[-600:]}")


def end(process: "subprocess.Popen[bytes]") -> None:
    """End the server and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):  # whoever is left of its group
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
