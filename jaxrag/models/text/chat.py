"""Chat templates: Jinja programs that ship with a tokenizer, rendered in a sandbox with limits.

A template comes from a downloaded directory, so it runs in Jinja's immutable sandbox, and in a
process that may take so much time and memory and no more. The environment offers what templates are
written against: ``raise_exception``, ``strftime_now``, the loop controls, ``{% generation %}``
blocks and a ``tojson`` that does not escape HTML.
"""

import atexit
import contextlib
import datetime
import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxrag.base.errors import TokenizerError

MAX_SECONDS = 2  # of processor time, to render once; templates of models take milliseconds
MAX_BYTES = 1 << 30  # of address space of the process that renders
MAX_CHARACTERS = 16 << 20  # of what is rendered

_WORKER = Path(__file__).with_name("chat_worker.py")
RESERVED = ("messages", "tools", "add_generation_prompt", "strftime_now")  # no ``values``
_NONE: Mapping[str, Any] = MappingProxyType({})
_KEPT = 64  # prompts: a knowledge base asks every question in the same one


def render_template(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    *,
    add_generation_prompt: bool,
    now: datetime.datetime | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    values: Mapping[str, Any] = _NONE,
) -> str:
    """Render a chat template.

    ``messages`` are mappings with "role" and "content", ``tools`` definitions of functions as
    OpenAI's clients write them; plain values that survive JSON. ``special_tokens`` are the names
    templates use, such as ``bos_token``, ``values`` further variables. ``now`` is what
    ``strftime_now`` prints, by default the present. Raises TokenizerError when the template is
    malformed, refuses the messages, or passes a limit of this module.
    """
    request = {
        "source": source,
        "messages": [dict(message) for message in messages],
        "special_tokens": dict(special_tokens),
        "tools": [dict(tool) for tool in tools] or None,
        "values": dict(values),
        "add_generation_prompt": add_generation_prompt,
        "now": None if now is None else now.isoformat(),
        "seconds": MAX_SECONDS,
        "bytes": MAX_BYTES,
        "characters": MAX_CHARACTERS,
    }
    line = json.dumps(request) + "\n"
    return _WORKER_PROCESS.render(line) if now is None else _kept(line)


@functools.lru_cache(maxsize=_KEPT)
def _kept(line: str) -> str:
    return _WORKER_PROCESS.render(line)


class _WorkerProcess:
    """The process that renders; started by the first render, and again after one that ended it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0  # a child of fork() must not use its parent's pipes

    def render(self, line: str) -> str:
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
                answered = process.stdout.readline()
            except BrokenPipeError:
                answered = ""
            except BaseException:  # interrupted: its answer would be taken for the next one's
                self.stop()
                raise
            if not answered.endswith("\n"):
                self.stop()
                slow = process.returncode == -signal.SIGXCPU
                limit = f"{MAX_SECONDS} s" if slow else f"{MAX_BYTES >> 20} MiB"
                raise TokenizerError(
                    f"the chat template cannot render these messages: it takes more than {limit}"
                )
        answer = json.loads(answered)
        if "error" in answer:
            why = " ".join(answer["error"].split())[:400]
            raise TokenizerError(f"the chat template cannot render these messages: {why}")
        text: str = answer["text"]
        return text

    def stop(self) -> None:
        """End the process, if it is one of ours."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(1)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def _running(self) -> "subprocess.Popen[str]":
        if self._process is None or self._owner != os.getpid():
            # Of a session of its own, so that an interrupt of the terminal is not for it.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
                start_new_session=True,
            )
            self._owner = os.getpid()
        return self._process


_WORKER_PROCESS = _WorkerProcess()
atexit.register(_WORKER_PROCESS.stop)
