"""Log-probabilities of chosen tokens, as chats and completions tell them."""

from typing import Any

from jaxrag.models.model import Model
from jaxrag.server.answers.asking import Piece

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def token_text(model: Model, token_id: int) -> str:
    """A token as text, special ones too; by its id where the model has no tokenizer."""
    if model.tokenizer is None:
        return f"token_id:{token_id}"
    return model.tokenizer.decode([token_id], skip_special=False)


def chat_logprobs(model: Model, piece: Piece) -> dict[str, Any]:
    """Of the tokens of a piece, in a chat's form."""
    content = []
    for token_id, logprob in zip(piece.ids, piece.logprobs, strict=True):
        text = token_text(model, token_id)
        known = None if _INCOMPLETE in text else list(text.encode())
        content.append({"token": text, "logprob": logprob, "bytes": known, "top_logprobs": []})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Of one completion, piece by piece; its offsets count characters of the whole answer."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._stream = None if model.tokenizer is None else model.tokenizer.stream()
        self._offset = 0

    def tell(self, piece: Piece) -> dict[str, Any]:
        """Of the tokens of the next piece."""
        tokens, offsets = [], []
        for token_id in piece.ids:
            tokens.append(token_text(self._model, token_id))
            offsets.append(self._offset)
            self._offset += 0 if self._stream is None else len(self._stream.push(token_id))
        pairs = zip(tokens, piece.logprobs, strict=True)
        return {
            "tokens": tokens,
            "token_logprobs": piece.logprobs,
            "top_logprobs": [{token: logprob} for token, logprob in pairs],
            "text_offset": offsets,
        }
