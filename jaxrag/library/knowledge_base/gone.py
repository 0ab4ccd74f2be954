"""Which documents have left the files that they came from.

Of what was read, a knowledge base may hold more than the files do now: a document whose file is no
more, a row that was taken out. Where a folder is missing or empty this may be a disk that is not
mounted, so that what came from it is doubtful.
"""

import dataclasses
import functools
import os
from collections.abc import Iterable
from pathlib import Path

from jaxrag.library.catalog import DocumentEntry


@dataclasses.dataclass(frozen=True)
class Gone:
    """Documents below the paths of a run that it did not come upon.

    Attributes:
      ids: of those whose file is no more, or was read to its end without them.
      doubtful: of those whose file is no more, as is all else in its folder.
      kept: how many have a file that is there and could not be read whole.
    """

    ids: tuple[str, ...] = ()
    doubtful: tuple[str, ...] = ()
    kept: int = 0


def compare(
    entries: Iterable[DocumentEntry], paths: Iterable[Path], seen: set[str], whole: set[str]
) -> Gone:
    """What has left the files.

    Args:
      entries: all documents of the knowledge base.
      paths: files and folders that were read, or that are not there.
      seen: ids that they hold.
      whole: resolved paths of the files that were read to their end.
    """
    roots = [os.path.realpath(path) for path in paths]
    is_bare = functools.cache(_is_bare)
    gone, doubtful, kept = [], [], 0
    for entry in entries:
        if entry.file is None or entry.id in seen:
            continue
        above = [root for root in roots if _holds(root, entry.file)]
        if not above:
            continue
        if entry.file in whole:
            gone.append(entry.id)
        elif not _is_no_more(entry.file):
            kept += 1
        elif any(is_bare(_nearest(entry.file, root)) for root in above):
            doubtful.append(entry.id)
        else:
            gone.append(entry.id)
    return Gone(tuple(gone), tuple(doubtful), kept)


def _holds(root: str, file: str) -> bool:
    return file == root or file.startswith(root.rstrip(os.sep) + os.sep)


def _is_no_more(path: str) -> bool:
    """Whether it is certain that nothing is there; a place that cannot be looked at is not."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def _nearest(file: str, root: str) -> str:
    """The folder nearest above a file that is there; at most the root."""
    folder = file
    while folder != root:
        folder = os.path.dirname(folder)
        if not _is_no_more(folder):
            break
    return folder


def _is_bare(folder: str) -> bool:
    """Whether nothing is in a folder that would be read, or the folder is not there at all."""
    try:
        return all(name.startswith(".") for name in os.listdir(folder))
    except NotADirectoryError:
        return False
    except OSError:
        return True
