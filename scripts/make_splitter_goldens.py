"""Write tests/goldens/splitters.json: what the splitters of other stacks make of some texts.

Needs langchain-text-splitters and haystack-ai, in an environment of their own:

    python scripts/make_splitter_goldens.py
"""

import importlib.metadata
import json
import random
from pathlib import Path

from haystack import Document
from haystack.components.preprocessors import DocumentSplitter
from langchain_text_splitters import RecursiveCharacterTextSplitter

OUT = Path(__file__).parents[1] / "tests" / "goldens" / "splitters.json"
WORDS = ["otters", "eat", "fish", "and", "sleep", "at", "day", "盐井由人手经营", "a", "paragraph"]
JOINS = [" "] * 12 + ["\n", "\n", "\n\n", "\n\n\n", "  ", "\t", ". ", ""]
LANGCHAIN = [(1000, 200), (1000, 20), (80, 20), (30, 0), (20, 19)]
HAYSTACK = [(200, 0), (20, 5), (7, 3), (5, 0)]


def text_of(draw: random.Random, words: int) -> str:
    """Words with white space of all kinds between them."""
    return "".join(draw.choice(WORDS) + draw.choice(JOINS) for _ in range(words))


def main() -> None:
    """Every case is a stack with its sizes, a text, and the passages that are no white space."""
    draw = random.Random(0)
    cases = []
    for count in (0, 1, 3, 20, 60, 300):
        text = text_of(draw, count)
        for size, overlap in LANGCHAIN:
            made = RecursiveCharacterTextSplitter(chunk_size=size, chunk_overlap=overlap)
            cases.append([f"langchain:{size}:{overlap}", text, made.split_text(text)])
        for size, overlap in HAYSTACK:
            splitter = DocumentSplitter("word", split_length=size, split_overlap=overlap)
            found = splitter.run([Document(content=text)])["documents"] if text.strip() else []
            passages = [part.content.strip() for part in found]
            cases.append([f"haystack:{size}:{overlap}", text, [part for part in passages if part]])
    names = ("langchain-text-splitters", "haystack-ai")
    versions = {name: importlib.metadata.version(name) for name in names}
    table = {"versions": versions, "cases": cases}
    OUT.write_text(json.dumps(table, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
