"""What prompts had and the store lacked."""

import stat

import numpy as np
import pytest
from fake_vllm import Engine
from stored_chunks import drawn

from jaxrag.base.errors import ConfigError, StoreError
from jaxrag.connectors import manifest
from jaxrag.connectors.plan import Planner
from jaxrag.connectors.wanted import FILE, Wanted, read

HEADER = np.arange(600, 640, dtype=np.int32)
ON = {"wanted_bytes": 4000}


def noted(stored):
    return [ids.tolist() for ids in read(stored.out, "t")]


def lacking(stored, ids, spans=None):
    return [it.tolist() for it in Planner(manifest.read(stored.out)).lacking(ids, spans)]


@pytest.mark.parametrize("led", [True, False])
def test_what_stands_in_front_of_the_first_chunk(stored, led):
    front = [stored.prefix] if led else []
    ids = np.concatenate((*front, HEADER, stored.chunks[1], [7, 8])).astype(np.int32)
    assert lacking(stored, ids) == [HEADER.tolist()]
    assert lacking(stored, np.concatenate((*front, HEADER))) == []


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17])
def test_short_prompts_lack_nothing(stored, length):
    assert lacking(stored, HEADER[:length]) == []


def test_chunks_of_spans(stored):
    other = HEADER[:20]
    ids = np.concatenate((stored.prefix, HEADER, stored.chunks[0], other, [7])).astype(np.int32)
    spans = [len(stored.prefix), len(HEADER), len(stored.chunks[0]), len(other)]
    assert lacking(stored, ids, spans) == [HEADER.tolist(), other.tolist()]
    assert lacking(stored, ids, [*spans[:2], 0]) == [HEADER.tolist()]
    assert lacking(stored, ids, [*spans, 1]) == [HEADER.tolist(), other.tolist()]


def test_chunks_that_saw_the_prefix_need_it(tmp_path):
    stored = drawn(tmp_path, "after_prefix")
    ids = np.concatenate((HEADER, stored.chunks[1], [7])).astype(np.int32)
    assert lacking(stored, ids) == []
    assert lacking(stored, ids, [len(HEADER), len(stored.chunks[1])]) == []


def test_an_engine_notes_it_once_and_only_if_told_to(connector, stored):
    ids = np.concatenate((stored.prefix, HEADER, stored.chunks[0], [7])).astype(np.int32)
    named = {"spans": [len(stored.prefix), len(HEADER)]}
    for extra, found in (({}, []), (ON, [HEADER.tolist()])):
        engine = Engine(connector, stored, extra=extra)
        for params in (None, named, {"off": True}, named, None):
            engine.run(engine.add(ids, params))
        engine.run(engine.add(stored.prompt(0, 1)))
        engine.close()
        assert noted(stored) == found
        assert (stored.out / FILE).exists() == bool(found)
    engine = Engine(connector, stored, extra=ON)  # started again
    engine.add(ids)
    engine.close()
    assert noted(stored) == [HEADER.tolist()]


def test_only_its_user_reads_the_file(tmp_path):
    (tmp_path / FILE).touch(0o644)
    Wanted(tmp_path, "t", 100)
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    (tmp_path / FILE).unlink()
    Wanted(tmp_path, "t", 100)
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600


def test_the_file_is_bounded(tmp_path, caplog):
    wanted = Wanted(tmp_path, "t", 200)
    for first in range(100):
        wanted.note(np.arange(first, first + 10, dtype=np.int32))
    assert 100 < (tmp_path / FILE).stat().st_size <= 200
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / FILE} is full: wanted_bytes=200"
    ]


def test_a_folder_that_cannot_be_written(tmp_path, caplog):
    (tmp_path / FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="wanted_bytes=9"):
        Wanted(tmp_path, "t", 9)
    assert not (tmp_path / "elsewhere").exists()
    (tmp_path / FILE).unlink()
    wanted = Wanted(tmp_path, "t", 999)
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).mkdir()
    for first in (1, 2):
        wanted.note(np.array([first], np.int32))  # a request goes on
    [record] = caplog.records
    assert "cannot be written" in record.getMessage()


@pytest.mark.parametrize("line", ["{", "[]", '{"tokenizer": "t", "ids": []}',
    '{"tokenizer": "t", "ids": [-1]}', '{"tokenizer": "t", "ids": [99999999999]}'])  # fmt: skip
def test_a_damaged_line_is_named(tmp_path, line):
    Wanted(tmp_path, "t", 999).note(HEADER)
    with (tmp_path / FILE).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(StoreError, match="line 2: is damaged"):
        list(read(tmp_path, "t"))
