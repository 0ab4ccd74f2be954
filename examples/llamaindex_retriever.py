"""A knowledge base as a LlamaIndex retriever: scored nodes of found chunks."""

import argparse
from pathlib import Path
from typing import Any

from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

import jaxrag

ROOT = Path(__file__).parents[1]


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


def main() -> None:
    """Ask the example documents, and print what was found and what the model makes of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default="Which animal does Kora Felell keep?")
    parser.add_argument("--kb", default=".cache/village-llamaindex", help="made when absent")
    parser.add_argument("--model", default=str(ROOT / "checkpoints" / "synthetic-0.8m" / "dual"))
    args = parser.parse_args()
    model = jaxrag.load_model(args.model)
    settings: dict[str, Any] = {"chunk_by": "sentence", "chunk_tokens": 20, "overlap": 0}
    with jaxrag.KnowledgeBase.open(args.kb, model, **settings) as kb:
        kb.add(jaxrag.read_paths([ROOT / "examples" / "village"]))
        for found in KnowledgeBaseRetriever(kb, k=3).retrieve(args.question):
            print(f"{found.node.metadata['document_id']}:", *found.node.get_content().split())
        print(jaxrag.generate(args.question, kb=kb, k=3).text)


if __name__ == "__main__":
    main()
