"""GET /v1/models."""

from typing import Any

from jaxrag.models.text.prompts import PromptTemplate
from jaxrag.server.state.entry import Call, no_model


def list_models(call: Call) -> dict[str, Any]:
    """The model, and ``model@kb`` for every knowledge base that the key may read."""
    return {"object": "list", "data": _entries(call)}


def get_model(call: Call) -> dict[str, Any]:
    """One of them."""
    name = call.path["name"]
    for entry in _entries(call):
        if entry["id"] == name:
            return entry
    raise no_model(call.state, name)


def _entries(call: Call) -> list[dict[str, Any]]:
    state = call.state
    first = state.default_base(call.access)
    uploads = state.settings.data is not None and call.access.documents == "write"
    words = state.model.tokenizer
    return [
        {
            "id": state.name + ("" if name is None else f"@{name}"),
            "object": "model",
            "created": state.created,
            "owned_by": "jaxrag",
            "max_model_len": state.model.config.max_positions,
            "knowledge_base": name,
            "template": None if name else _named(state.prompt_format),
            "methods": list(state.methods),
            "method": state.default_method(state.knowledge_bases.get(name or "")).name,
            "decode_rules": list(state.decode_rules),
            "k": state.settings.k,
            "max_tokens": state.settings.max_new_tokens,
            "uploads": uploads,
            "word_level": words is not None and words.is_word_level,
            "cites": words is not None and state.model.placement.on_device,
            "questions": list(state.settings.questions) if name == first else [],
        }
        for name in (None, *state.readable(call.access))
    ]


def _named(template: PromptTemplate) -> dict[str, str]:
    """A prompt format's name and digest; what it says is the operator's."""
    return {"name": template.name, "digest": template.digest}
