"""Answers of a batch run as JSON lines, written so that a killed run can go on.

An answer is ``{"id", ...}`` with the names of ``answers.Result``, or ``{"id", "error"}``.
"""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from jaxrag.base.errors import ConfigError
from jaxrag.serve.question_files import Id


class AnswerFile:
    """Answers as they come, in one file that one run at a time appends to.

    ``<file>.settings.json`` records what the answers were made with. A file that is there already
    is continued only under the same settings; a last line that was cut short is removed first.

    Attributes:
      done: ids that are answered or refused already.
      refused: how many of them are refused.
    """

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
        """Open for appending. ConfigError: other settings, a foreign file, or another run in it."""
        self.path = Path(path)
        self.done: set[Id] = set()
        self.refused = 0
        _agree(self.path, settings)
        self._file = self.path.open("a+b")
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"{self.path}: another run is writing to it; wait for it or name another file"
                ) from None
            self._read()
        except BaseException:
            self._file.close()
            raise

    def write(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append one line each; they are on disk when this returns."""
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        self._file.write(text.encode("utf-8"))
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._file.close()

    def _read(self) -> None:
        self._file.seek(0)
        whole = 0
        for number, raw in enumerate(self._file, 1):
            if not raw.endswith(b"\n"):
                self._file.truncate(whole)
                break
            whole += len(raw)
            try:
                line = json.loads(raw)
                self.done.add(line["id"])
            except (ValueError, TypeError, KeyError):
                raise ConfigError(
                    f'{self.path}:{number}: not an answer (a JSON object with an "id"); repair the '
                    "line or name another file"
                ) from None
            self.refused += "error" in line


@contextlib.contextmanager
def written_once(
    path: str | os.PathLike[str], exchange: Callable[[Any], list[Any]], first: bool
) -> Iterator[Path]:
    """Where one of several processes writes that all give the same answers: the first to ``path``.

    The others continue a copy of what is there, which is thrown away: so all leave out the same
    questions.

    Args:
      path: of the answers.
      exchange: gives what every process passes, that of the first as the first of them.
      first: whether this process is it.
    """
    path = Path(path)
    both = (path, settings_path(path))
    held = [file.read_bytes() if file.is_file() else None for file in both] if first else None
    begun = exchange(held)[0]
    if first:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="jaxrag-") as folder:
        own = Path(folder) / path.name
        for file, data in zip((own, settings_path(own)), begun, strict=True):
            if data is not None:
                file.write_bytes(data)
        yield own


def joined_parts(path: str | os.PathLike[str], parts: Iterable[str]) -> None:
    """Write the answers of several files into one, at once; the parts stay, to go on from.

    Raises ConfigError where it cannot be written.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as out:
            for part in parts:
                with open(part, "rb") as answers:
                    shutil.copyfileobj(answers, out)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written ({error.strerror}); name a file in a folder of yours"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


def settings_path(answers: str | os.PathLike[str]) -> Path:
    """The path of the settings of an answer file."""
    path = Path(answers)
    return path.with_name(path.name + ".settings.json")


def _agree(path: Path, settings: Mapping[str, Any]) -> None:
    """Record the settings, or compare them with those recorded: ConfigError where they differ."""
    record = settings_path(path)
    try:
        if not record.exists():
            if path.exists() and path.stat().st_size:
                raise ConfigError(
                    f"{path}: holds something and {record.name} is not beside it, so it cannot be "
                    "continued; name another file"
                )
            _create(record, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
        known = _flat(json.loads(record.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written ({error.strerror}); name a file in a folder of yours"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{record}: not valid JSON ({error}); name another file") from None
    new = _flat(json.loads(json.dumps(settings)))
    for name in sorted(known.keys() | new.keys()):
        if known.get(name) != new.get(name):
            raise ConfigError(
                f"{path}: was begun with {name}={known.get(name)!r}, this run has "
                f"{new.get(name)!r}; go on with the same settings or name another file"
            )


def _create(path: Path, text: str) -> None:
    """Make a file with its whole content at once, unless somebody else has made it."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted names."""
    if not isinstance(value, dict):
        return {name: value}
    parts = [_flat(part, f"{name}.{key}" if name else key) for key, part in value.items()]
    return {key: leaf for part in parts for key, leaf in part.items()}
