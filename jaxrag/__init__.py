"""Retrieval-augmented generation that never prefills a document twice.

The public names; each is imported from its module on first use, so that `import jaxrag` costs
nothing and touches no device.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrag.base.errors import JaxragError
    from jaxrag.base.guide import Guide
    from jaxrag.base.installed import __version__ as __version__
    from jaxrag.base.sharding import make_mesh
    from jaxrag.engine.sampling import Sampling
    from jaxrag.engine.sampling_params import SamplingParams
    from jaxrag.library.catalog import Hit
    from jaxrag.library.documents import Document, read_paths
    from jaxrag.library.knowledge_base import KnowledgeBase
    from jaxrag.library.knowledge_base.reports import AddReport
    from jaxrag.models.model import Model, load_model
    from jaxrag.models.text.prompts import TEMPLATES, PromptTemplate
    from jaxrag.reuse.methods import METHODS, Method
    from jaxrag.serve.answers import AsyncStream, Result, Stream
    from jaxrag.serve.conversation import Source
    from jaxrag.serve.generate import agenerate, generate
    from jaxrag.serve.warm import Warmed, warm_up

_MODULES = {
    "__version__": "jaxrag.base.installed",
    "AddReport": "jaxrag.library.knowledge_base.reports",
    "AsyncStream": "jaxrag.serve.answers",
    "Guide": "jaxrag.base.guide",
    "Hit": "jaxrag.library.catalog",
    "Stream": "jaxrag.serve.answers",
    "Document": "jaxrag.library.documents",
    "JaxragError": "jaxrag.base.errors",
    "KnowledgeBase": "jaxrag.library.knowledge_base",
    "METHODS": "jaxrag.reuse.methods",
    "Method": "jaxrag.reuse.methods",
    "Model": "jaxrag.models.model",
    "PromptTemplate": "jaxrag.models.text.prompts",
    "Result": "jaxrag.serve.answers",
    "Sampling": "jaxrag.engine.sampling",
    "SamplingParams": "jaxrag.engine.sampling",
    "Source": "jaxrag.serve.conversation",
    "TEMPLATES": "jaxrag.models.text.prompts",
    "Warmed": "jaxrag.serve.warm",
    "agenerate": "jaxrag.serve.generate",
    "generate": "jaxrag.serve.generate",
    "load_model": "jaxrag.models.model",
    "make_mesh": "jaxrag.base.sharding",
    "read_paths": "jaxrag.library.documents",
    "warm_up": "jaxrag.serve.warm",
}

__all__ = [
    "METHODS",
    "TEMPLATES",
    "AddReport",
    "AsyncStream",
    "Document",
    "Guide",
    "Hit",
    "JaxragError",
    "KnowledgeBase",
    "Method",
    "Model",
    "PromptTemplate",
    "Result",
    "Sampling",
    "SamplingParams",
    "Source",
    "Stream",
    "Warmed",
    "agenerate",
    "generate",
    "load_model",
    "make_mesh",
    "read_paths",
    "warm_up",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'jaxrag' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
