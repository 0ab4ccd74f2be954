"""A knowledge base: documents, their chunks, and the KV of every chunk."""

from jaxrag.library.knowledge_base.knowledge_base import KnowledgeBase
from jaxrag.library.knowledge_base.upkeep import GcReport, RemoveReport
from jaxrag.library.options import SearchMode

__all__ = ["GcReport", "KnowledgeBase", "RemoveReport", "SearchMode"]
