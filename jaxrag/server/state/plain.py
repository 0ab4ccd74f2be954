"""Whether a server may read plain prompts, and by which method: what training or a gate says."""

import json
from pathlib import Path
from typing import Any

from jaxrag.base.errors import ConfigError
from jaxrag.models.model import Model
from jaxrag.reuse.methods import Method, method_named
from jaxrag.serve.ask import Ask
from jaxrag.serve.plain import LEAST_REQUESTS, plain_subject, rules_for
from jaxrag.server.settings import ServerSettings


def plain_methods(
    settings: ServerSettings, model: Model, methods: dict[str, Method]
) -> dict[str, Method]:
    """The methods by name, the default first: at the ratio of the gate, where there is one.

    Raises ConfigError for plain prompts that cannot be read or that nothing speaks for, and for a
    gate of other weights, rules or settings.
    """
    if settings.plain == "off":
        return methods
    if model.tokenizer is None or not model.tokenizer.has_chat_template:
        raise ConfigError(
            f"plain={settings.plain!r}: the model has no chat template; add chat_template.jinja to "
            "its directory"
        )
    ask = Ask(plain=settings.plain, passage_rules=settings.passage_rules)
    if settings.plain_gate is not None:
        method = _gated(Path(settings.plain_gate), settings, model, ask)
        return {method.name: method} | {
            name: one for name, one in methods.items() if name != method.name
        }
    method = next(iter(methods.values()))
    if rules_for(ask, method) is None or settings.plain_ungated:
        return methods
    if method.positions not in model.reading.block_positions:
        raise ConfigError(
            f"plain={settings.plain!r}: nothing says that this model was trained to read blocks as "
            f"{method.name} does; train it, pass what `jaxrag gate` wrote as --plain-gate, or "
            "--plain-ungated to have it so all the same"
        )
    return methods


def _gated(path: Path, settings: ServerSettings, model: Model, ask: Ask) -> Method:
    """The method that passed, at its ratio."""
    try:
        gate: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        name, ratio, requests = str(gate["method"]), gate["ratio"], int(gate["questions"])
        subject = gate["subject"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: expected what `jaxrag gate` wrote ({error})") from None
    if ratio is None or requests < LEAST_REQUESTS:
        raise ConfigError(
            f"{path}: the gate was not passed, or over fewer than {LEAST_REQUESTS} requests with "
            "passages: run `jaxrag gate` again"
        )
    named = name if settings.method is None else settings.method
    method = method_named(named).with_ratio(ratio)
    own = plain_subject(model, ask, method)
    if own != subject:
        other = next((it for it in own if own[it] != subject.get(it)), "settings")
        raise ConfigError(
            f"{path}: the gate was passed with another {other}; run `jaxrag gate` with this one"
        )
    return method
