"""The row file: whole frames only, damage refused, compaction under a reader, killed writers."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxrag.base.errors import StoreError
from jaxrag.library.retrieve import rows as rows_module
from jaxrag.library.retrieve.rows import RowFile

DIM = 4


def block(start, count):
    """Rows whose every value is their id."""
    ids = np.arange(start, start + count, dtype=np.int64)
    return ids, np.repeat(ids[:, None], DIM, axis=1).astype(np.float32)


def held(folder, mode="r"):
    """Live ids, after a check that each has its vector."""
    rows = RowFile.open(folder, DIM, "exact", mode=mode).refresh()
    assert (rows.vectors == rows.ids[:, None]).all()
    return sorted(rows.ids[rows.live].tolist())


@pytest.fixture
def folder(tmp_path):
    """Ids 0-4 and 5-7 without 2: three frames."""
    made = RowFile.open(tmp_path / "v", DIM, "exact")
    made.append(*block(0, 5))
    made.append(*block(5, 3))
    made.remove(np.array([2, 77]))
    return made.folder


def test_frames_add_up(folder):
    assert held(folder) == [0, 1, 3, 4, 5, 6, 7]


def test_a_log_cut_anywhere_holds_its_whole_frames(folder):
    data, vectors = (folder / "0.log").read_bytes(), (folder / "0.vectors").read_bytes()
    ends = [24 + 40, 24 + 40 + 24 + 24, len(data)]
    assert len(data) == ends[1] + 24 + 8
    states = [[], [0, 1, 2, 3, 4], list(range(8)), [0, 1, 3, 4, 5, 6, 7]]
    for length in range(0, len(data), 3):
        (folder / "0.log").write_bytes(data[:length])
        expected = states[sum(length >= end for end in ends)]
        assert held(folder) == expected, length
        # The next writer goes on from there.
        writer = RowFile.open(folder, DIM, "exact")
        writer.append(*block(20, 2))
        assert held(folder) == sorted([*expected, 20, 21])
        (folder / "0.vectors").write_bytes(vectors)


@pytest.mark.parametrize(
    "garbage", [bytes(64), b"\xff" * 61, bytes(range(7, 250, 5))], ids=["zeros", "ones", "mixed"]
)
def test_garbage_behind_the_last_frame_is_overwritten(folder, garbage):
    with open(folder / "0.log", "ab") as log:
        log.write(garbage)
    assert held(folder) == [0, 1, 3, 4, 5, 6, 7]
    RowFile.open(folder, DIM, "exact").append(*block(9, 1))
    assert held(folder) == [0, 1, 3, 4, 5, 6, 7, 9]


def test_rows_without_a_frame_do_not_count(folder):
    with open(folder / "0.vectors", "ab") as file:
        file.write(np.full((3, DIM), np.nan, np.float32).tobytes() + b"xy")
    assert held(folder) == [0, 1, 3, 4, 5, 6, 7]
    RowFile.open(folder, DIM, "exact").append(*block(9, 4))
    assert held(folder) == [0, 1, 3, 4, 5, 6, 7, 9, 10, 11, 12]


@pytest.mark.parametrize(("name", "place"), [("0.log", 0), ("0.log", 30), ("0.vectors", 5)])
def test_a_flipped_bit_before_the_last_frame_is_refused(folder, name, place):
    data = bytearray((folder / name).read_bytes())
    data[place] ^= 4
    (folder / name).write_bytes(data)
    with pytest.raises(StoreError, match="do not match their digests at byte 0; remove"):
        RowFile.open(folder, DIM, "exact", mode="r")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged"),
        ('{"dim": 4}', "is damaged"),
        ('{"dim": 4, "format": 9, "generation": 0}', "has format 9, this version reads format 1"),
    ],
)
def test_unknown_description_is_refused(folder, text, message):
    (folder / "rows.json").write_text(text)
    with pytest.raises(StoreError, match=message):
        RowFile.open(folder, DIM, "exact")


def test_missing_files_are_an_error(folder):
    (folder / "0.log").unlink()
    with pytest.raises(StoreError, match="vanish"):
        RowFile.open(folder, DIM, "exact", mode="r")


def test_compaction_frees_the_rows_and_keeps_readers(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "_MIN_DEAD", 50)
    monkeypatch.setattr(rows_module, "_COPIED_ROWS", 16)
    folder = tmp_path / "v"
    writer = RowFile.open(folder, DIM, "exact")
    writer.append(*block(0, 100))
    reader = RowFile.open(folder, DIM, "exact", mode="r")
    before = reader.refresh()
    writer.remove(np.arange(0, 50))
    assert writer.refresh().generation == 0  # half of the rows: not yet
    writer.remove(np.array([50]))
    after = writer.refresh()
    assert after.generation == 1 and after.live.all()
    assert after.ids.tolist() == list(range(51, 100))
    assert sorted(path.name for path in folder.iterdir()) == [
        "1.log", "1.vectors", "lock", "rows.json",
    ]  # fmt: skip
    assert (folder / "1.vectors").stat().st_size == 49 * 4 * DIM
    assert (before.vectors[:, 0] == np.arange(100)).all()  # still mapped
    assert reader.refresh().ids.tolist() == list(range(51, 100))
    writer.append(*block(200, 2))
    assert held(folder) == [*range(51, 100), 200, 201]
    writer.remove(np.arange(51, 300))
    assert held(folder) == [] and writer.refresh().generation == 2


def test_an_interrupted_compaction_leaves_the_old_generation(folder):
    (folder / "1.vectors").write_bytes(b"half of it")
    (folder / "1.log").write_bytes(b"")
    assert held(folder) == [0, 1, 3, 4, 5, 6, 7]
    RowFile.open(folder, DIM, "exact")  # a writer sweeps
    assert not (folder / "1.vectors").exists()


def test_a_full_disk_loses_nothing(folder):
    program = """
import resource, sys
from pathlib import Path
import numpy as np
from jaxrag.base.errors import StoreError
from jaxrag.library.retrieve.rows import RowFile
rows = RowFile.open(Path(sys.argv[1]), 4, "exact")
resource.setrlimit(resource.RLIMIT_FSIZE, (160, 160))
try:
    rows.append(np.arange(100, 200), np.zeros((100, 4), np.float32))
except StoreError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "free space" in done.stdout and done.stdout.count("\n") == 1
    assert held(folder) == [0, 1, 3, 4, 5, 6, 7]


KILLED = """
import sys
from pathlib import Path
import numpy as np
from jaxrag.library.retrieve import rows as module
from jaxrag.library.retrieve.rows import RowFile
module._MIN_DEAD = 40
rows = RowFile.open(Path(sys.argv[1]), 4, "exact")
state = rows.refresh()
number = int(state.ids.max()) + 1 if len(state.ids) else 0
while True:
    ids = np.arange(number, number + 8)
    rows.append(ids, np.repeat(ids[:, None], 4, axis=1).astype(np.float32))
    print("+", number, flush=True)
    if number >= 32:
        rows.remove(ids - 32)
        print("-", number - 32, flush=True)
    number += 8
"""


def test_a_killed_writer_loses_nothing_it_acknowledged(tmp_path):
    folder = tmp_path / "v"
    for round_ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(folder)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
            stdout=subprocess.PIPE,
            text=True,
        )
        first = process.stdout.readline()
        time.sleep(0.05 + 0.03 * round_)
        process.send_signal(signal.SIGKILL)
        events = [line.split() for line in [first, *process.stdout] if line.endswith("\n")]
        process.wait()
        process.stdout.close()
        added = {int(number) for sign, number in events if sign == "+"}
        removed = {int(number) for sign, number in events if sign == "-"}
        present = held(folder, "rw")
        unsure = {max(added) + 8}, {max(added) - 32}  # written or not when the signal came
        for number in added - removed - unsure[1]:
            assert set(range(number, number + 8)) <= set(present)
        for number in removed:
            assert not set(range(number, number + 8)) & set(present)
        assert {i // 8 * 8 for i in present} >= added - removed - unsure[1]
        assert all(present.count(i) == 1 for i in present)
        assert len(present) % 8 == 0  # an add is there as a whole or not at all
