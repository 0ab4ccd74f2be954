"""Reader of .ipynb: the cells of a Jupyter notebook, without what they printed."""

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from jaxrag.base.errors import DocumentError
from jaxrag.library.documents.document import BadDocument, Document
from jaxrag.library.documents.files import File, decode, read_bytes, require_few_values
from jaxrag.library.documents.text import first_heading

_FORMAT = 4  # of notebooks since 2015


def read_notebook(stream: BinaryIO, file: File) -> Iterator[Document | BadDocument]:
    """One document: prose as it stands, code between fences; outputs are left out.

    It is titled by the first heading.
    """
    text = decode(read_bytes(stream))
    require_few_values(text)
    try:
        notebook = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"not JSON ({error}); expected a notebook") from None
    if not isinstance(notebook, dict) or not isinstance(notebook.get("cells"), list):
        raise DocumentError(
            f"is no notebook of format {_FORMAT}; convert it with `jupyter nbconvert --to notebook`"
        )
    language = _language(notebook.get("metadata"))
    prose, parts = [], []
    for cell in notebook["cells"]:
        kind, source = _cell(cell)
        if not source.strip():
            continue
        if kind == "code":
            parts.append(f"```{language}\n{source}\n```")
        else:
            prose.append(source)
            parts.append(source)
    if not parts:
        raise DocumentError("holds no cell with text; leave the file out")
    title = first_heading("\n".join(prose)) or file.path.stem
    yield Document(file.name, "\n\n".join(parts), title, file.reported)


def _cell(cell: Any) -> tuple[str, str]:
    """Kind and text of a cell, whose lines may be listed."""
    source = cell.get("source", "") if isinstance(cell, dict) else None
    if isinstance(source, list) and all(isinstance(line, str) for line in source):
        source = "".join(source)
    if not isinstance(source, str):
        raise DocumentError("has a cell without a text for its source; save the notebook anew")
    return str(cell.get("cell_type")), source.strip("\n")


def _language(metadata: Any) -> str:
    found = metadata.get("language_info") if isinstance(metadata, dict) else None
    name = found.get("name") if isinstance(found, dict) else None
    return name if isinstance(name, str) and name.isalnum() else ""
