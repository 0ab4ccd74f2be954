"""Writers at work: what they have announced is not collected, at any grace."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import StoreError
from jaxrag.library.catalog import Catalog
from jaxrag.library.knowledge_base.writers import FOLDER, KeyWriter, Writers

KEY, OTHER = "ab" * 20, "cd" * 20


def files(folder):
    return sorted((folder / FOLDER).iterdir())


def test_keys_are_needed_while_their_writer_is_at_work(tmp_path):
    writers = Writers(tmp_path)
    assert not writers.need(KEY)
    assert writers.since() is None
    with KeyWriter.at_work(tmp_path) as one, KeyWriter.at_work(tmp_path) as two:
        assert not writers.need(KEY)
        one.needs([KEY])
        assert writers.need(KEY)
        assert not writers.need(OTHER)
        two.needs(iter([OTHER, KEY]))
        assert writers.need(OTHER)
        assert abs(writers.since() - time.time()) < 60
        assert len(files(tmp_path)) == 2
    assert not writers.need(KEY)
    assert files(tmp_path) == []


def test_an_error_ends_the_work(tmp_path):
    with pytest.raises(KeyError), KeyWriter.at_work(tmp_path) as writer:
        writer.needs([KEY])
        raise KeyError
    assert not Writers(tmp_path).need(KEY)
    assert files(tmp_path) == []


def test_a_killed_writer_needs_nothing(tmp_path):
    program = """
import sys, time
from pathlib import Path
from jaxrag.library.knowledge_base.writers import KeyWriter
with KeyWriter.at_work(Path(sys.argv[1])) as writer:
    writer.needs(["ab" * 20])
    print("at work", flush=True)
    time.sleep(600)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout.readline() == b"at work\n"
        writers = Writers(tmp_path)
        assert writers.need(KEY)
        assert not writers.need(OTHER)
        process.send_signal(signal.SIGKILL)
    assert not writers.need(KEY)
    assert files(tmp_path) == []


def test_a_folder_that_takes_no_file_is_named(tmp_path):
    (tmp_path / FOLDER).write_text("not a folder")
    with refused(StoreError, FOLDER), KeyWriter.at_work(tmp_path / FOLDER):
        pass


@pytest.mark.parametrize("encoders", [("isolated",), ("after_prefix", "neighbours")])
def test_gc_without_grace_between_put_and_catalog(
    make_kb, text_of, monkeypatch, embedder, encoders
):
    """Another process collects right before every commit: KV and vectors of the batch stay."""
    options = {"encoders": encoders, "embedder": embedder, "index": "exact"}
    kb, other = make_kb(**options), make_kb(**options)
    kb.add([text_of(1)])
    reports = []

    def after_gc(change):
        def run(self, *args):
            if self is kb._catalog:
                time.sleep(0.01)
                reports.append(other.gc(grace_seconds=0))
            return change(self, *args)

        return run

    for name in ("put", "put_contexts"):
        monkeypatch.setattr(Catalog, name, after_gc(getattr(Catalog, name)))
    # Nothing is encoded behind the commit: what was announced before the look-up stays.
    encoded = []
    encode_missing = type(kb._encoding(kb.model)).encode_missing

    def noted(self, encoder, wanted):
        made = encode_missing(self, encoder, wanted)
        encoded.append(len(made))
        return made

    monkeypatch.setattr(type(kb._encoding(kb.model)), "encode_missing", noted)
    report = kb.add([text_of(2), text_of(3)])
    assert report.documents == 2
    assert reports
    assert {(r.chunks, r.attempts, r.vectors) for r in reports} == {(0, 0, 0)}
    found = kb.verify()
    assert found.damaged == ()
    assert found.ok == kb.stats()["chunks"] * len(encoders)
    assert np.array_equal(kb._vectors.index.ids(), kb._catalog.chunk_ids())
    assert encoded[-1] == 0


def test_what_a_dead_writer_put_is_collected_at_once(make_kb, text_of, monkeypatch):
    kb = make_kb()
    kb.add([text_of(1)])
    whole = kb.stats()["stored"]["chunks"]
    monkeypatch.setattr(Catalog, "put", lambda *args: (_ for _ in ()).throw(StoreError("full")))
    with refused(StoreError):
        kb.add([text_of(2)])
    assert kb.stats()["stored"]["chunks"] > whole
    time.sleep(1.1)  # records have whole seconds
    assert kb.gc(grace_seconds=0).chunks > 0
    assert kb.stats()["stored"]["chunks"] == whole
