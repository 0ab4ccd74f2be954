"""The prompt format that a model is evaluated in, and what results say of the model."""

from typing import Any

from jaxrag.models.model import Model
from jaxrag.models.text.prompts import PromptTemplate, template_named


def format_of(model: Model, template: str | PromptTemplate | None) -> PromptTemplate:
    """The named prompt format; of None the one that the model brings, or that suits it.

    Raises TokenizerError where the model's tokenizer cuts the markers of a named one.
    """
    if template is None:
        return model.prompt_format()
    found = template_named(template) if isinstance(template, str) else template
    found.check_markers(model.text_tokenizer())
    return found


def described(path: str, model: Model, template: PromptTemplate) -> dict[str, Any]:
    """What a result says of a model, JSON-able."""
    return {
        "path": path,
        "weights": model.digest,
        "dtype": model.config.dtype,
        "template": template.to_dict(),
    }
