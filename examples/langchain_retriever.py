"""A knowledge base as a LangChain retriever: found chunks, and where they come from."""

import argparse
from pathlib import Path
from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever

import jaxrag

ROOT = Path(__file__).parents[1]


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


def main() -> None:
    """Ask the example documents, and print what was found and what the model makes of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default="Which animal does Kora Felell keep?")
    parser.add_argument("--kb", default=".cache/village-langchain", help="made when absent")
    parser.add_argument("--model", default=str(ROOT / "checkpoints" / "synthetic-0.8m" / "dual"))
    args = parser.parse_args()
    model = jaxrag.load_model(args.model)
    settings: dict[str, Any] = {"chunk_by": "sentence", "chunk_tokens": 20, "overlap": 0}
    with jaxrag.KnowledgeBase.open(args.kb, model, **settings) as kb:
        kb.add(jaxrag.read_paths([ROOT / "examples" / "village"]))
        for document in KnowledgeBaseRetriever(kb=kb, k=3).invoke(args.question):
            print(f"{document.metadata['document_id']}:", *document.page_content.split())
        print(jaxrag.generate(args.question, kb=kb, k=3).text)


if __name__ == "__main__":
    main()
