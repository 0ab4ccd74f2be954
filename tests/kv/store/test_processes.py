"""Several processes on one directory: races, a killed writer, a full disk, permissions."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

# Every process builds the chunks of these numbers; the bytes are ``value`` everywhere.
PROGRAM = """
import resource, sys
import numpy as np
from jaxrag.base.errors import StoreError
from jaxrag.kv.store import *

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=16, dtype="float16")
MODEL = fingerprint({"weights": "shared"})

def chunk(number, value, tokens=16):
    ids = np.full(tokens, number, np.int32)
    record = Provenance("isolated", content_id("t", ids), context_id("isolated", ids[:0]))
    key = chunk_key(MODEL, record.content_id, record.context_id)
    return key, np.full(LAYOUT.shape(tokens), value, np.float16), record

def open_store(mode="rw"):
    return ChunkStore.open(sys.argv[1], MODEL, LAYOUT, mode=mode)
"""


def start(root, body, *arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM + body, str(root), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


def run(root, body, *arguments):
    process = start(root, body, *arguments)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return out


@pytest.fixture(scope="module")
def shared():
    """The names that PROGRAM defines, in this process."""
    names = {}
    exec(PROGRAM, names)
    return names


def open_here(shared, root, mode="r"):
    return shared["ChunkStore"].open(root, shared["MODEL"], shared["LAYOUT"], mode=mode)


def test_racing_writers_agree_on_one_version_of_each_key(tmp_path, shared):
    """Three writers create the repository and put the same keys with different bytes."""
    body = """
value = int(sys.argv[2])
chunks = [chunk(number, value) for number in range(8)]
print("ready", flush=True)
sys.stdin.readline()
store = open_store()
with store.writer() as writer:
    futures = [writer.submit(*c) for c in chunks]
print(sum(future.result().won for future in futures), flush=True)
"""
    root = tmp_path / "kb"
    writers = [start(root, body, value) for value in (1, 2, 3)]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    wins = [int(writer.communicate(timeout=60)[0]) for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert sum(wins) == 8

    store = open_here(shared, root)
    keys = [shared["chunk"](number, 0)[0] for number in range(8)]
    assert sorted(keys) == list(store.keys())
    values = [np.unique(store.get(key)) for key in keys]
    assert all(value.size == 1 for value in values)
    counts = [sum(value[0] == writer for value in values) for writer in (1, 2, 3)]
    assert counts == wins
    assert sum(path.is_file() for path in (root / "kv").rglob("*")) == 3 * 8


def test_a_killed_writer_loses_nothing_that_was_acknowledged(tmp_path, shared):
    body = """
store = open_store()
for number in range(10_000):
    store.put(chunk(number, number)[0], chunk(number, number)[1], record=chunk(number, 0)[2])
    print(number, flush=True)
"""
    lines = []
    with start(tmp_path, body) as writer:
        for line in writer.stdout:  # to its end: ``communicate`` misses what is buffered here
            lines.append(line)
            if len(lines) == 11:
                writer.kill()
    assert [int(line) for line in lines] == list(range(len(lines)))
    acknowledged = len(lines)
    assert acknowledged >= 11

    store = open_here(shared, tmp_path)
    numbers = range(acknowledged + 3)
    keys = [shared["chunk"](number, 0)[0] for number in numbers]
    got = store.get_many(keys, on_missing="skip")
    assert got.corrupt == ()
    assert set(keys[:acknowledged]) <= set(got.offsets)
    # The put under way may have been committed, but none behind it.
    assert set(got.missing) >= set(keys[acknowledged + 1 :])
    for number, key in enumerate(keys):
        if key in got.offsets:
            first, tokens = got.offsets[key]
            assert (got.kv[:, :, first : first + tokens] == number).all()
