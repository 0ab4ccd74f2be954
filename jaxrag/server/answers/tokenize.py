"""POST /tokenize and /detokenize, as vLLM has them; llama.cpp's ``content`` is taken too."""

from typing import Any

import numpy as np

from jaxrag.base.types import HostArray
from jaxrag.models.model import as_token_ids
from jaxrag.serve.ask import Ask, is_ids
from jaxrag.serve.questions import prepare, resolve
from jaxrag.server.answers.asking import text_ids
from jaxrag.server.errors import invalid
from jaxrag.server.fields import Named, Talk, wrong
from jaxrag.server.state.entry import Call
from jaxrag.server.state.state import ServerState

MOST = 1 << 19  # characters of a text, or token ids


class _Fields(Talk, Named):
    prompt: str | None = None
    content: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class _Tokens(Named):
    tokens: Any = None


def tokenize(call: Call) -> dict[str, Any]:
    """Token ids of a text, or of messages as they would be asked without any chunks."""
    model, fields = call.state.model, call.read(_Fields)
    ids = _ids(call.state, fields)
    answer = {"tokens": ids, "count": len(ids), "max_model_len": model.config.max_positions}
    if fields.return_token_strs:
        tokenizer = model.text_tokenizer()
        texts = {token: tokenizer.decode([token], skip_special=False) for token in set(ids)}
        answer["token_strs"] = [texts[token] for token in ids]
    return answer


def detokenize(call: Call) -> dict[str, Any]:
    """The text of token ids, special ones too."""
    given = call.read(_Tokens).tokens
    if isinstance(given, list) and len(given) > MOST:
        raise invalid(f"tokens has {len(given)} entries: expected at most {MOST}", "tokens")
    if given != [] and not is_ids(given):
        raise wrong("tokens", given, "a list of token ids")
    model = call.state.model
    ids: HostArray | list[int] = as_token_ids(given, model.config, "tokens") if given else []
    text = model.text_tokenizer().decode(ids, skip_special=False)
    return {"prompt": text, "content": text}


def _ids(state: ServerState, fields: _Fields) -> list[int]:
    model = state.model
    if fields.messages is not None:
        method = next(iter(state.methods.values()))
        settings = resolve(Ask(method=method, max_new_tokens=1, prefix_cache=False), model=model)
        prompt = prepare(settings, fields.conversation()).prompt
        return [int(i) for i in np.concatenate((prompt.prefix, *prompt.chunks, prompt.final))]
    text = fields.content if fields.prompt is None else fields.prompt
    if text is None:
        raise invalid("prompt: expected a text, or messages in its place", "prompt")
    if len(text) > MOST:
        raise invalid(
            f"prompt has {len(text)} characters: expected at most {MOST}; send it in pieces",
            "prompt",
        )
    return [int(text_id) for text_id in text_ids(model, text, leading=fields.add_special_tokens)]
