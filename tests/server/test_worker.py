"""The parsing process: what it reads, and that a file which stops it costs nobody but itself."""

import os
import signal
import threading
import time

import pytest

from jaxrag.documents import BadDocument
from jaxrag.documents.chunking import Chunking, split
from jaxrag.errors import DocumentError
from jaxrag.server.worker import Worker, WorkerFailed

NAME = "file-0123"
CUT = Chunking(8, 2)
LONG = 300.0  # seconds that no test needs


def always():
    return True


@pytest.fixture(scope="module")
def tokenizer(served_model):
    return served_model.tokenizer


@pytest.fixture(scope="module")
def worker(tokenizer):
    made = Worker(tokenizer, LONG)
    yield made
    made.close()


@pytest.fixture
def parsed(worker, tmp_path):
    """``parsed(data, filename)``: what a file of these bytes gives."""

    def parse(data, filename):
        path = tmp_path / "content"
        path.write_bytes(data)
        return list(worker.parse(path, filename, NAME, CUT, always))

    return parse


def test_a_document_comes_with_the_chunks_that_would_be_cut_here(parsed, tokenizer):
    text = "# A title\n\n" + "Giso Berow lives in Tondorf. \u4f60\u597d " * 5
    [found] = parsed(text.encode(), "notes.md")
    document = found.document
    assert (document.id, document.title, document.file) == (NAME, "A title", "notes.md")
    wanted = split(document.text, tokenizer, CUT)
    assert len(found.chunks) == len(wanted) > 1
    for here, there in zip(wanted, found.chunks, strict=True):
        assert (here.index, here.start, here.end, here.text, here.page, here.section) == (
            there.index, there.start, there.end, there.text, there.page, there.section,
        )  # fmt: skip
        assert here.ids.dtype == there.ids.dtype and (here.ids == there.ids).all()


def test_every_record_is_a_document_of_the_file(parsed):
    lines = b'{"text": "Giso", "id": "a", "year": 1}\nnot json\n{"text": "Berow"}\n'
    first, bad, last = parsed(lines, "rows.jsonl")
    assert (first.document.id, first.document.metadata) == (f"{NAME}/a", {"year": 1})
    assert isinstance(bad, BadDocument) and bad.source == "rows.jsonl:2"
    assert last.document.id == f"{NAME}:3"


@pytest.mark.parametrize(
    ("data", "filename", "why"),
    [
        (b"\x00\x01", "a.bin", "file type '.bin'"),
        (b"a\0b", "a.txt", "binary data"),
        (b"PK\x03\x04", "a.docx", "cannot be parsed as DOCX"),
        (b"", "a.txt", "empty"),
        (b"x", "a", "file type ''"),
    ],
)
def test_what_cannot_be_read_says_why(parsed, worker, data, filename, why):
    [bad] = parsed(data, filename)
    assert why in bad.reason
    assert worker.pid is not None  # the same process takes the next file


@pytest.fixture
def endless(tmp_path):
    """A file that never ends and never begins."""
    path = tmp_path / "endless"
    os.mkfifo(path)
    return path


def test_a_file_that_takes_too_long_fails(tokenizer, endless):
    with pytest.raises(WorkerFailed, match=r"took longer than 0\.5 s to parse; split the file"):
        hasty = Worker(tokenizer, 0.5)
        list(hasty.parse(endless, "a.txt", NAME, CUT, always))
    assert hasty.pid is None


def test_a_process_that_dies_fails_its_file_alone(worker, endless, parsed):
    parsed(b"Giso", "a.txt")
    threading.Timer(0.1, os.kill, (worker.pid, signal.SIGSEGV)).start()
    with pytest.raises(DocumentError, match="its parser ended with signal 11; save the file anew"):
        list(worker.parse(endless, "a.txt", NAME, CUT, always))
    assert parsed(b"Giso", "a.txt")[0].document.text == "Giso"


def test_a_file_that_is_wanted_no_more_is_left(worker, endless, parsed):
    parsed(b"Giso", "a.txt")
    looks = iter([True, True, False])
    with pytest.raises(InterruptedError):
        list(worker.parse(endless, "a.txt", NAME, CUT, lambda: next(looks)))
    assert worker.pid is None


def test_the_process_ends_with_its_parent(worker, parsed):
    parsed(b"Giso", "a.txt")
    process = worker._process
    process.stdin.close()  # as the end of the parent does
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process.poll() == 0
    worker.close()
