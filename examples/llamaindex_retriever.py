"""A knowledge base as a LlamaIndex retriever: scored nodes of found chunks."""

from typing import Any

from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode


class KnowledgeBaseRetriever(BaseRetriever):
    """Asks ``kb``, an open jaxrag.KnowledgeBase, by ``kb.search(query, k, where=where)``."""

    def __init__(self, kb: Any, k: int = 5, where: dict[str, Any] | None = None) -> None:
        self._kb, self._k, self._where = kb, k, where
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [
            NodeWithScore(
                node=TextNode(
                    text=hit.text,
                    metadata={
                        **hit.metadata,
                        "chunk_id": hit.chunk_id,
                        "document_id": hit.document_id,
                        "file": hit.file,
                        "page": hit.page,
                    },
                ),
                score=hit.score,
            )
            for hit in self._kb.search(query_bundle.query_str, self._k, where=self._where)
        ]
