"""The folder of a knowledge base and the place of its repository, as they are named."""

import os
import urllib.parse
from pathlib import Path

from jaxrag.base.errors import KnowledgeBaseError


def find_folder(path: str | os.PathLike[str]) -> Path:
    """The local folder that a path or file:// URL names. Raises KnowledgeBaseError for others."""
    text = os.fspath(path)
    scheme, separator, _ = text.partition("://")
    if separator:
        if scheme != "file":
            raise KnowledgeBaseError(
                f"{text}: a knowledge base needs a local folder, its catalog is an SQLite file; "
                "give a path or a file:// URL (its chunks may lie elsewhere: store=)"
            )
        text = urllib.parse.unquote(urllib.parse.urlsplit(text).path)
    folder = Path(text).absolute()
    if folder.exists() and not folder.is_dir():
        raise KnowledgeBaseError(f"{folder} is a file; expected the folder of a knowledge base")
    return folder


def store_location(store: str | os.PathLike[str]) -> str:
    """A repository as it is remembered: a URL as it is, a folder with its absolute path."""
    text = os.fspath(store)
    if "://" in text and not text.startswith("file://"):
        return text
    return str(find_folder(text))
