"""Asking a server of this package: texts in, and the time to the first token as its client sees it.

Prompts are the data set's: the server must run with its prompt format (`jaxrag serve --template`),
which is compared by digest before anything is asked.
"""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrag.base.errors import ContextExceeded, RequestError
from jaxrag.library.options import NeighboursFrom
from jaxrag.measure.evals.asked import Line
from jaxrag.measure.evals.datasets.asking import ATTEMPTS, TimedAnswer, is_own
from jaxrag.measure.evals.datasets.corpus import NeighboursAccount
from jaxrag.measure.evals.datasets.spec import DatasetItem
from jaxrag.models.text.prompts import PromptTemplate

_SECONDS = 600.0  # that a server may be silent


class ServerGone(RequestError):
    """A server that cannot be reached, or that ends in the middle of an answer."""


class OverHttp:
    """A server that is running."""

    def __init__(
        self,
        url: str,
        methods: Sequence[str],
        template: PromptTemplate,
        max_new_tokens: int,
        neighbours: NeighboursFrom = "corpus",
    ) -> None:
        """Ask what it serves.

        Raises ServerGone, and RequestError for a server that is none of this package, offers not
        all of these methods, or writes prompts otherwise.
        """
        self._url = url.rstrip("/")
        self.methods = tuple(methods)
        self._max_new_tokens = max_new_tokens
        self._neighbours = neighbours
        try:
            self._model = json.loads(b"".join(self._lines("/v1/models", None)))["data"][0]
            offered, written = self._model["methods"], self._model["template"]
        except (LookupError, TypeError, ValueError):
            raise RequestError(f"--server {url}: no server of jaxrag; name one") from None
        for name in self.methods:
            if name not in offered:
                raise RequestError(
                    f"--method {name}: {url} offers {', '.join(offered)}; name one of them"
                )
        if written["digest"] != template.digest:
            raise RequestError(
                f"{url} writes prompts as {written['name']!r}; write this data set's with "
                "--write-template FILE, and start the server with --template FILE"
            )

    def about(self) -> dict[str, Any]:
        """The model of the server, by its name, and its prompt format."""
        return {"path": self._model["id"], "server": True, "template": self._model["template"]}

    def neighbours(self) -> NeighboursAccount | None:
        """An oracle where it was asked for; else no method of a server sees any here."""
        return {"from": "prompt", "oracle": True} if self._neighbours == "prompt" else None

    def beside_full(
        self, item: DatasetItem, answers: Mapping[str, TimedAnswer]
    ) -> Mapping[str, Line]:
        """A server gives no logits."""
        return {}

    def exchange(self, value: Any) -> list[Any]:
        """This process asks alone, however many hold the server's model."""
        return [value]

    def answer(self, method: str, item: DatasetItem) -> TimedAnswer:
        """Ask until the time is only its own; the server has chunks wherever it keeps them."""
        text, account, first = self._asked(method, item, self._max_new_tokens)
        again, seconds = account, first
        for _ in range(ATTEMPTS - 1):
            if is_own(again["timings"], again["counts"]):
                break
            _, again, seconds = self._asked(method, item, 1)
        own = is_own(again["timings"], again["counts"])
        return TimedAnswer(
            text=text,
            finish_reason=account["finish_reason"],
            prompt_tokens=account["prompt_tokens"],
            first=first,
            ttft=seconds if own else None,
            counts=again["counts"],
            flops=again["flops"],
            notes=again["notes"],
            encoded=account["counts"]["encoded"],
        )

    def _asked(
        self, method: str, item: DatasetItem, max_new_tokens: int
    ) -> tuple[str, dict[str, Any], float]:
        """An answer, its account, and seconds from the texts to the first event of a token."""
        body = {
            "model": self._model["id"],
            "prompt": item.question,
            "documents": [{"title": title, "text": text} for title, text in item.documents],
            "method": method,
            "max_tokens": max_new_tokens,
            "temperature": 0,
            "logprobs": 1,  # a token without text is an event, too
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._neighbours == "prompt":
            body["neighbours"] = "prompt"
        start = time.perf_counter()
        first, text = 0.0, ""
        account: dict[str, Any] | None = None
        finish = "stop"
        for line in self._lines("/v1/completions", json.dumps(body).encode()):
            name, _, data = line.partition(b":")
            if name != b"data" or data.strip() == b"[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise RequestError(f"--server {self._url}: {event['error'].get('message')}")
            for choice in event["choices"]:
                if choice["logprobs"] is not None:
                    first = first or time.perf_counter() - start
                text += choice["text"]
                finish = choice["finish_reason"] or finish
            if "jaxrag" in event:
                account = event["jaxrag"] | {"prompt_tokens": event["usage"]["prompt_tokens"]}
        if account is None:
            raise ServerGone(f"--server {self._url}: its answer ended before its account")
        # An answer that is over at its first token has no event of one.
        return text, account | {"finish_reason": finish}, first or time.perf_counter() - start

    def _lines(self, path: str, body: bytes | None) -> Iterator[bytes]:
        """Lines of what it answers to a GET, or to a POST with a body.

        Raises ServerGone, ContextExceeded for a prompt that does not fit, and RequestError for
        another status.
        """
        request = urllib.request.Request(
            self._url + path, body, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
                yield from answer
        except urllib.error.HTTPError as error:
            raise self._refusal(error) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise ServerGone(f"--server {self._url}: it does not answer ({reason})") from None

    def _refusal(self, error: urllib.error.HTTPError) -> RequestError:
        try:
            said = json.loads(error.read())["error"]
            text, code = str(said["message"]), said.get("code")
        except (OSError, LookupError, TypeError, ValueError):
            text, code = "", None
        if code == "context_length_exceeded":
            return ContextExceeded(text)
        return RequestError(f"--server {self._url}: status {error.code}: {text[:300]}")
