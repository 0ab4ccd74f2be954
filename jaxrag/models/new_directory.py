"""Write a directory completely or not at all."""

import contextlib
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from jaxrag.base.errors import ModelError


def refuse_existing(target: Path) -> None:
    """Raise ModelError when ``target`` is a file or a directory that is not empty."""
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ModelError(f"{target}: exists already; name a new or an empty directory")


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A temporary sibling of ``target`` that takes its name when the block succeeds.

    When the block raises, nothing remains. Raises ModelError as ``refuse_existing`` does.
    """
    target = Path(target).absolute()
    refuse_existing(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
