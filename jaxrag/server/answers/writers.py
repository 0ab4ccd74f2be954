"""How answers are written: what chats and completions have in common."""

import contextlib
import dataclasses
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from jaxrag.models.model import Model
from jaxrag.serve.answers import Piece, Result
from jaxrag.serve.thoughts import spoken, thought_of
from jaxrag.server.answers.calling import Calling, CallReader, shown_call
from jaxrag.server.answers.cited import of_chat
from jaxrag.server.answers.visit import Visit
from jaxrag.server.errors import Problem
from jaxrag.server.fields import Generation


def head(visit: Visit, kind: str, name: str) -> dict[str, Any]:
    """What an answer, or each event of it, begins with: its id, object, moment and model."""
    return {
        "id": f"{name}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": visit.named,
    }


def token_text(model: Model, token_id: int) -> str:
    """A token as text, special ones too, no two alike; parts of characters as OpenAI spells them.

    By its id where the model has no text of it.
    """
    spelled = _bytes_of(model, token_id)
    if spelled is None:
        return f"token_id:{token_id}"
    with contextlib.suppress(UnicodeDecodeError):
        if not model.text_tokenizer().is_byte(token_id):
            return spelled.decode()
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _bytes_of(model: Model, token_id: int) -> bytes | None:
    return None if model.tokenizer is None else model.tokenizer.token_bytes(token_id)


def logprobs_of(model: Model, piece: Piece) -> list[dict[str, Any]]:
    """Tokens of a piece with their log-probabilities, and the likeliest in the place of each."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        spelled = _bytes_of(model, token_id)
        known = None if spelled is None else list(spelled)
        return {"token": token_text(model, token_id), "logprob": logprob, "bytes": known}

    pairs = zip(piece.ids, piece.logprobs, strict=True)
    tops = piece.top or [[] for _ in piece.ids]
    return [
        entry(*pair) | {"top_logprobs": [entry(*likely) for likely in top]}
        for pair, top in zip(pairs, tops, strict=True)
    ]


class TokenTexts:
    """Tokens one by one as texts, and where each begins in the whole text.

    The whole text is without special tokens: those begin where the next one does.
    """

    def __init__(self, model: Model) -> None:
        self._pieces: list[str] = []
        self._length = 0  # of these
        self._model = model
        self._stream = None if model.tokenizer is None else model.tokenizer.stream()

    def push(self, ids: Sequence[int]) -> tuple[list[str], list[int]]:
        """The texts of more tokens, and where they begin."""
        offsets = []
        for token_id in ids:
            offsets.append(self._length)
            if self._stream is not None:
                self._pieces.append(self._stream.push(token_id))
                self._length += len(self._pieces[-1])
        return [token_text(self._model, token_id) for token_id in ids], offsets

    def finish(self) -> str:
        """The whole text, with what an incomplete character leaves."""
        return "".join(self._pieces) + ("" if self._stream is None else self._stream.flush())


class AnswerWriter:
    """Writes the answer of an endpoint; its choices are numbered as the prompts.

    An endpoint has a subclass, which says how text and log-probabilities look.
    """

    def __init__(self, visit: Visit, kind: str, name: str, fields: Generation) -> None:
        """``kind`` and ``name``: of the answer, as ``head`` has them."""
        self.model = visit.state.model
        self.fields = fields
        self.visit = visit
        self._head = head(visit, kind, name)

    def part(self, text: str | None) -> dict[str, Any]:
        """New text in an event; None: the choice has ended."""
        raise NotImplementedError

    def message(self, place: int, result: Result) -> dict[str, Any]:
        """The whole text of a choice."""
        raise NotImplementedError

    def logprobs(self, place: int, piece: Piece) -> dict[str, Any]:
        """Log-probabilities of the tokens of the next piece of a choice."""
        raise NotImplementedError

    def opening(self) -> Iterator[dict[str, Any]]:
        """The first events of a stream."""
        return iter(())

    def piece(self, place: int, piece: Piece) -> Iterator[dict[str, Any]]:
        """The events of what is new of a choice; none where it shows nothing."""
        logprobs = self._logprobs(place, piece)
        if piece.text or logprobs is not None:
            yield self.event(_choice(place, self.part(piece.text), logprobs))

    def finish(self, place: int, result: Result) -> dict[str, Any]:
        """The last event of a choice."""
        return self.event(_choice(place, self.part(None), finish=self.reason(place, result)))

    def reason(self, place: int, result: Result) -> str:
        """Why a choice ended."""
        return result.finish_reason

    async def settle(self, results: Sequence[Result], account: dict[str, Any]) -> None:
        """Called once all choices have ended, before their end is told."""

    def ended(
        self, place: int, result: Result, account: dict[str, Any] | None
    ) -> Iterator[dict[str, Any]]:
        """The last events of a choice; of the last one with the account of the answer."""
        if account is None:
            yield self.finish(place, result)
        elif self.fields.stream_options.include_usage:
            yield self.finish(place, result)
            yield self.event() | account
        else:
            del account["usage"]
            yield self.finish(place, result) | account

    def failed(self, problem: Problem) -> dict[str, Any]:
        """The last event of a stream that failed."""
        return problem.body()

    def whole(
        self,
        results: Sequence[Result],
        pieces: Sequence[list[Piece]],
        account: dict[str, Any],
    ) -> dict[str, Any]:
        """All choices at once, of the pieces that each came in, and their account."""
        choices = []
        for place, (result, parts) in enumerate(zip(results, pieces, strict=True)):
            logprobs = [logprob for part in parts for logprob in part.logprobs]
            top = [likeliest for part in parts for likeliest in part.top]
            piece = Piece(result.text, result.token_ids, logprobs, top)
            text, shown = self.message(place, result), self._logprobs(place, piece)
            choices.append(_choice(place, text, shown, self.reason(place, result)))
        return self.event(*choices) | account

    def event(self, *choices: dict[str, Any]) -> dict[str, Any]:
        """Choices behind the head."""
        with_usage = self.fields.stream and self.fields.stream_options.include_usage
        return self._head | {"choices": list(choices)} | ({"usage": None} if with_usage else {})

    def spoken(self, place: int, result: Result) -> tuple[str, Result]:
        """What a choice thinks, and the choice without it."""
        return spoken(result, self.visit.askings[place].thinks)

    def sure(self, place: int, text: str, reader: CallReader) -> tuple[str, str]:
        """Of the beginning of a choice what surely is a thought, and what is said and no call."""
        thought, at = thought_of(text, self.visit.askings[place].thinks, ended=False)
        return thought, text[at : at + reader.sure(text[at:])]

    def _logprobs(self, place: int, piece: Piece) -> dict[str, Any] | None:
        return self.logprobs(place, piece) if self.fields.logprobs is not False else None


class ChatWriter(AnswerWriter):
    """Writes a chat. Where its answers may call tools, a stream tells what is no call as it comes.

    Raises RequestError for a model whose calls are not known.
    """

    def __init__(self, visit: Visit, fields: Generation, calling: Calling | None = None) -> None:
        kind = "chat.completion.chunk" if fields.stream else "chat.completion"
        super().__init__(visit, kind, "chatcmpl", fields)
        self.reader = CallReader(visit.state.model, calling)
        self._empty = "" if calling is None else None  # content of a message that says nothing
        self._texts = [""] * fields.choices
        self._sent = [("", "")] * fields.choices  # thoughts, and what was said

    def opening(self) -> Iterator[dict[str, Any]]:
        """Who speaks."""
        delta = {"role": "assistant", "content": ""}
        for place in range(self.fields.choices):
            yield self.grown(place, delta)

    def piece(self, place: int, piece: Piece) -> Iterator[dict[str, Any]]:
        """The events of what is surely a thought, or no call."""
        self._texts[place] += piece.text
        sent = self._sent[place]
        self._sent[place] = thought, speech = self.sure(place, self._texts[place], self.reader)
        if new := thought[len(sent[0]) :]:
            yield self.grown(place, {"reasoning_content": new})
        new = speech[len(sent[1]) :]
        yield from super().piece(place, dataclasses.replace(piece, text=new))

    def part(self, text: str | None) -> dict[str, Any]:
        """What the message grows by."""
        return {"delta": {} if text is None else {"content": text}}

    def message(self, place: int, result: Result) -> dict[str, Any]:
        """The message; of one that may call, without content where it is calls alone."""
        thought, result = self.spoken(place, result)
        text, calls = self.reader.read(result.text)
        body = {"role": "assistant", "content": text or self._empty, "refusal": None}
        body |= {"reasoning_content": thought} if thought else {}
        called = {"tool_calls": list(map(shown_call, calls))} if calls else {}
        return {"message": body | {"annotations": of_chat(result)} | called}

    def reason(self, place: int, result: Result) -> str:
        """Why it ended: for the calls, if there are any."""
        stops = result.finish_reason == "stop"
        called = stops and self.reader.read(self.spoken(place, result)[1].text)[1]
        return "tool_calls" if called else super().reason(place, result)

    def ended(
        self, place: int, result: Result, account: dict[str, Any] | None
    ) -> Iterator[dict[str, Any]]:
        """What is left of the text, the calls, citations, and the end."""
        thought, alone = self.spoken(place, result)
        speech, calls = self.reader.read(alone.text)
        sent = self._sent[place]
        rest = {"reasoning_content": thought[len(sent[0]) :], "content": speech[len(sent[1]) :]}
        delta: dict[str, Any] = {name: text for name, text in rest.items() if text}
        if calls:
            delta["tool_calls"] = [{"index": at, **shown_call(it)} for at, it in enumerate(calls)]
        for grown in (delta, {"annotations": notes} if (notes := of_chat(alone)) else {}):
            if grown:
                yield self.grown(place, grown)
        yield from super().ended(place, result, account)

    def grown(self, place: int, delta: dict[str, Any]) -> dict[str, Any]:
        """An event of what a message grows by."""
        return self.event(_choice(place, {"delta": delta}))

    def logprobs(self, place: int, piece: Piece) -> dict[str, Any]:
        """Token by token, with its bytes where they are known."""
        return {"content": logprobs_of(self.model, piece), "refusal": None}


def _choice(
    place: int,
    text: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
    finish: str | None = None,
) -> dict[str, Any]:
    return {"index": place, **text, "logprobs": logprobs, "finish_reason": finish}
