"""A knowledge base: documents, their chunks, and the KV of every chunk."""

from jaxrag.library.knowledge_base.knowledge_base import KnowledgeBase
from jaxrag.library.knowledge_base.search import SearchMode
from jaxrag.library.knowledge_base.upkeep import GcReport, RemoveReport

__all__ = ["GcReport", "KnowledgeBase", "RemoveReport", "SearchMode"]
