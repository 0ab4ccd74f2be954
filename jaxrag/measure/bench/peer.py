"""A peer library in a process of its own, with its own interpreter: one JSON line a question."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrag.base.errors import RequestError


class Peer:
    """A running peer script.

    Attributes:
      about: what the peer says of itself: versions, threads, device.
    """

    def __init__(
        self,
        python: str,
        script: Path,
        *arguments: str,
        option: str = "--peer-python",
        needs: str = "torch and transformers",
    ) -> None:
        """Start ``script`` under the interpreter ``python``. Raises RequestError if it cannot.

        ``option`` named the interpreter, and ``needs`` is what it must import, for messages.
        """
        self._needs = needs
        try:
            self._process = subprocess.Popen(
                [python, str(script), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "TQDM_DISABLE": "1"},  # no bars among what is said
            )
        except OSError as error:
            raise RequestError(f"{option} {python}: cannot be run ({error})") from None
        self.about = self._read()

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The peer's answer to a question. Raises RequestError when the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process and close its pipes."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise RequestError(
                f"the peer ended with exit code {self._process.returncode}; does its interpreter "
                f"import {self._needs}? Its messages stand above"
            )
        return dict(json.loads(line))
