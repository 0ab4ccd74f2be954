"""`jaxrag read`: what a reader makes of files, without a model or a knowledge base."""

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrag.cli.command import SUMMARIES, Args, argument, command
from jaxrag.cli.ingest import READING, files_of
from jaxrag.cli.options import JSON
from jaxrag.cli.output import print_json
from jaxrag.models.text.printable import printable


def run(args: Args) -> int:
    """Exit code 0 when everything was read, 3 when something could not be."""
    from jaxrag.library.documents import Document

    documents, skipped = [], []
    for document in files_of(args):
        if not isinstance(document, Document):
            skipped.append(dataclasses.asdict(document))
            print(f"skipped {document.source}: {document.reason}", file=sys.stderr)
        elif args.json:
            documents.append(dataclasses.asdict(document))
        else:
            head = document_lines(document.id, document.title, document.metadata)
            print("\n".join([*head, *text_lines(document.text), ""]))
    if args.json:
        print_json({"documents": documents, "skipped": skipped})
    return 3 if skipped else 0


def document_lines(name: str, title: str, metadata: Mapping[str, Any]) -> Iterator[str]:
    """Lines about a document: what it is called, what was left out of it, its other metadata."""
    from jaxrag.library.documents.left_out import LEFT_OUT, left_out_of

    yield printable(f"== {name}: {title}")
    yield from (printable(f"left out: {line}") for line in left_out_of(metadata))
    if rest := {key: value for key, value in metadata.items() if key != LEFT_OUT}:
        yield f"metadata: {json.dumps(rest, ensure_ascii=False)}"
    yield ""


def text_lines(text: str) -> Iterator[str]:
    """The lines of a text, as a terminal may have them."""
    yield from map(printable, text.split("\n"))


COMMAND = command(
    "read",
    run,
    SUMMARIES["read"],
    "jaxrag read lease.pdf budget.xlsx",
    argument("paths", "PATH", "a file or folder, as of `jaxrag ingest`", several=True),
    READING,
    JSON,
    sync_empty=False,
)
