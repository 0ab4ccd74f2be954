"""Records of a data set's file, each with the line that it begins on.

JSON lines and lists of JSON objects are read as they stand, also gzipped: a table would refuse
columns such as RGB's answers, which are texts in one row and lists of lists in the next. Parquet
files and names of the hub (``hub:ORG/NAME:CONFIG:SPLIT``) are read through the package datasets.
"""

import dataclasses
import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxrag.base.errors import RequestError

HUB = "hub:"


@dataclasses.dataclass(frozen=True)
class DataRecord:
    """One record; ``where`` is "FILE:LINE"."""

    where: str
    values: Mapping[str, Any]

    def wrong(self, field: str, expected: str) -> RequestError:
        """The error of a field that is not what was expected."""
        if field not in self.values:
            return RequestError(f'{self.where}: no field "{field}"; expected {expected}')
        shown = json.dumps(self.values[field], ensure_ascii=False, default=str)
        return RequestError(f'{self.where}: "{field}" is {shown:.60}; expected {expected}')


def records_of(source: str, fields: Mapping[str, tuple[type, ...]]) -> list[DataRecord]:
    """All records of a file, each with these fields.

    Args:
      source: a .json, .jsonl, .json.gz, .jsonl.gz or .parquet file, or ``hub:ORG/NAME...``.
      fields: what every record must have, with the types that each may be of.

    Raises RequestError, with file, line and field, for what is none.
    """
    path = Path(source)
    if source.startswith(HUB):
        records = _of_table(source, _from_hub(source))
    elif not path.is_file():
        raise RequestError(f"{source}: no such file; name one of the data set's own files")
    elif path.suffix == ".parquet":
        records = _of_table(source, _table(source, "parquet", data_files=source, split="train"))
    else:
        records = list(_of_text(source, _text(path)))
    if not records:
        raise RequestError(f"{source}: no records; name a file that has some")
    for record in records:
        for name, kinds in fields.items():
            if not isinstance(record.values.get(name), kinds):
                raise record.wrong(name, " or ".join(kind.__name__ for kind in kinds))
    return records


def _text(path: Path) -> str:
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    except (OSError, EOFError) as error:
        raise RequestError(f"{path}: cannot be read ({error}); mend or replace it") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: no UTF-8 ({error.reason}); convert it") from None


def _of_text(source: str, text: str) -> Iterator[DataRecord]:
    """Of a list of objects, or of one object a line."""
    if not text.lstrip().startswith("["):
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield _record(f"{source}:{number}", line)
        return
    decoder, at, counted, number = json.JSONDecoder(), text.index("[") + 1, 0, 1
    while True:
        while at < len(text) and text[at] in ", \t\r\n":
            at += 1
        number += text.count("\n", counted, at)
        counted = at
        if at == len(text) or text[at] == "]":
            return
        try:
            value, at = decoder.raw_decode(text, at)
        except ValueError as error:
            raise RequestError(f"{source}:{number}: no JSON ({error}); mend the file") from None
        yield _checked(f"{source}:{number}", value)


def _record(where: str, line: str) -> DataRecord:
    try:
        return _checked(where, json.loads(line))
    except ValueError as error:
        raise RequestError(f"{where}: no JSON ({error}); expected one object a line") from None


def _checked(where: str, value: Any) -> DataRecord:
    if not isinstance(value, dict):
        raise RequestError(f"{where}: {json.dumps(value):.60}; expected a JSON object")
    return DataRecord(where, value)


def _from_hub(source: str) -> Any:
    name, *others = source.removeprefix(HUB).split(":")
    if not name or len(others) > 2:
        raise RequestError(f"{source}: expected {HUB}ORG/NAME, :CONFIG and :SPLIT behind it")
    config, split = [*others, *[""] * (2 - len(others))]
    return _table(source, name, name=config or None, split=split or "test")


def _table(source: str, path: str, **options: Any) -> Any:
    import datasets

    shown = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(path, **options)
    except Exception as error:  # the library raises many kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RequestError(f"{source}: cannot be read ({reason:.200})") from None
    finally:
        if not shown:
            datasets.enable_progress_bars()


def _of_table(source: str, rows: Any) -> list[DataRecord]:
    return [DataRecord(f"{source}:{number}", row) for number, row in enumerate(rows, 1)]
