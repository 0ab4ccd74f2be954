"""A knowledge base as a LangChain retriever: found chunks, and where they come from."""

from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever


class KnowledgeBaseRetriever(BaseRetriever):
    """Asks ``kb``, an open jaxrag.KnowledgeBase, by ``kb.search(query, k, where=where)``."""

    kb: Any
    k: int = 5
    where: dict[str, Any] | None = None

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        return [
            Document(
                page_content=hit.text,
                metadata={
                    **hit.metadata,
                    "chunk_id": hit.chunk_id,
                    "document_id": hit.document_id,
                    "file": hit.file,
                    "page": hit.page,
                    "score": hit.score,
                },
            )
            for hit in self.kb.search(query, self.k, where=self.where)
        ]
