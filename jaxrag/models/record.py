"""``jaxrag.json``, which makes a directory a jaxrag checkpoint: config and digests.

And how such a directory is written: completely or not at all.
"""

import contextlib
import dataclasses
import json
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from jaxrag.base.config import ModelConfig, config_from_dict, config_to_dict
from jaxrag.base.errors import ModelError
from jaxrag.models.tensor_files import read_json

RECORD_FILE = "jaxrag.json"
_VERSION = 1


@dataclasses.dataclass(frozen=True)
class CheckpointRecord:
    """What a checkpoint says about itself."""

    config: ModelConfig
    digest: str  # digest.params_digest of the saved parameters
    files: dict[str, str]  # xxh3-128 of every file of the parameters, by path below the directory


def is_checkpoint(directory: str | Path) -> bool:
    """Whether the directory is a jaxrag checkpoint."""
    return (Path(directory) / RECORD_FILE).is_file()


def write_record(directory: Path, record: CheckpointRecord) -> None:
    """Write the record of a checkpoint."""
    values = {
        "version": _VERSION,
        "digest": record.digest,
        "files": record.files,
        "config": config_to_dict(record.config),
    }
    text = json.dumps(values, indent=2) + "\n"
    (directory / RECORD_FILE).write_text(text, encoding="utf-8")


def read_record(directory: Path) -> CheckpointRecord:
    """Read the record of a checkpoint. Raises ModelError or ConfigError when it is not one."""
    path = Path(directory) / RECORD_FILE
    if not path.is_file():
        raise ModelError(f"{directory}: no {RECORD_FILE}; expected a jaxrag checkpoint")
    values = read_json(path)
    if values.get("version") != _VERSION:
        raise ModelError(
            f"{path}: version {values.get('version')!r}, this program reads version {_VERSION}"
        )
    known = set(values) == {"version", "digest", "files", "config"}
    if not (known and isinstance(values["files"], dict) and isinstance(values["config"], dict)):
        raise ModelError(f"{path}: expected a version, a digest, and the objects files and config")
    config = config_from_dict(values["config"], str(path))
    return CheckpointRecord(config, str(values["digest"]), dict(values["files"]))


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
