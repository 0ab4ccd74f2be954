"""The parsing process: what it reads, and that a file which stops it costs nobody but itself."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from refusal import refused

from jaxrag.base.errors import DocumentError
from jaxrag.library.documents import BadDocument, Document, Intake, Shard, read_paths
from jaxrag.library.documents.chunking import Chunking, split
from jaxrag.library.documents.files import ReadOptions
from jaxrag.library.documents.parser import ParseLimits, Parser
from jaxrag.models.text.tokenizer import Tokenizer

NAME = "file-0123"
CUT = Chunking(8, 2)
LONG = 300.0  # seconds that no test needs


HOW = ReadOptions()


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir):
    return Tokenizer.load(tokenizer_dir)


@pytest.fixture(scope="module")
def worker(tokenizer):
    with Parser(ParseLimits(LONG, 16 << 30), tokenizer) as made:
        yield made
    assert made.pid is None


@pytest.fixture
def parsed(worker, tmp_path):
    """``parsed(data, filename)``: what a file of these bytes gives."""

    def parse(data, filename):
        path = tmp_path / "content"
        path.write_bytes(data)
        return list(worker.parse(path, filename, NAME, HOW, filename, chunking=CUT))

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


@pytest.fixture
def endless(tmp_path):
    """A file that never ends and never begins."""
    path = tmp_path / "endless"
    os.mkfifo(path)
    return path


@pytest.mark.parametrize(("filename", "left"), [("a.pdf", [10, 7, 4]), ("a.jsonl", [10, 10, 10])])
def test_bad_pages_take_from_the_time_of_their_file_and_bad_records_do_not(
    monkeypatch, tmp_path, filename, left
):
    parser, given = Parser(ParseLimits(10)), []
    bad = {"bad": {"source": filename, "reason": "cannot be read"}}
    frames = iter([(bad, 3), (bad, 3), ({}, 0)])

    def receive(pipe, seconds, wanted):
        given.append(seconds)
        return next(frames)

    monkeypatch.setattr(parser, "_running", lambda wanted: None)
    monkeypatch.setattr(parser, "_send", lambda pipe, message: None)
    monkeypatch.setattr(parser, "_receive", receive)
    assert len(list(parser.parse(tmp_path / filename, filename, NAME, HOW))) == 2
    assert given == left


def test_a_process_that_dies_fails_its_file_alone(worker, endless, parsed):
    parsed(b"Giso", "a.txt")
    threading.Timer(0.1, os.kill, (worker.pid, signal.SIGSEGV)).start()
    with refused(DocumentError, "11"):
        list(worker.parse(endless, "a.txt", NAME, HOW))
    assert parsed(b"Giso", "a.txt")[0].document.text == "Giso"


def test_a_file_that_is_wanted_no_more_is_left(worker, endless, parsed):
    parsed(b"Giso", "a.txt")
    looks = iter([True, True, False])
    with pytest.raises(InterruptedError):
        list(worker.parse(endless, "a.txt", NAME, HOW, wanted=lambda: next(looks)))
    assert worker.pid is None


def test_the_process_ends_with_its_parent(worker, parsed):
    parsed(b"Giso", "a.txt")
    process = worker._process
    worker._pipe.close()  # as the end of the parent does
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process.poll() == 0
    worker.close()


def texts(found):
    return [item.text if isinstance(item, Document) else item.reason for item in found]


@pytest.fixture
def many(tmp_path, make_pdf, make_docx):
    """A folder with a file of every kind that is parsed apart, and one of text."""
    folder = tmp_path / "many"
    folder.mkdir()
    (folder / "a.html").write_text("<title>T</title><p>of html")
    (folder / "b.txt").write_text("of text")
    (folder / "c.pdf").write_bytes(make_pdf(["of pdf", "second"]))
    (folder / "d.docx").write_bytes(make_docx(lambda document: document.add_paragraph("of docx")))
    (folder / "e.json").write_text('[{"text": "of json", "id": "own", "n": 1}, 5]')
    return folder


def test_what_comes_from_the_process_is_what_is_read_here(many, read_here):
    assert list(read_paths([many])) == list(read_here([many]))
    assert [item.file for item in read_paths([many / "c.pdf"])] == [str(many / "c.pdf")]


def test_a_name_that_is_no_unicode_is_read_there(tmp_path):
    path = os.path.join(os.fsencode(tmp_path), b"caf\xe9.html")
    with open(path, "wb") as file:
        file.write(b"<p>text")
    [bad] = read_paths([os.fsdecode(path)])  # the id of a document is Unicode
    assert "surrogate" in bad.reason


def test_one_process_reads_all_and_none_reads_text(many, monkeypatch):
    started = []
    start = subprocess.Popen

    def counted(*args, **kwargs):
        started.append(start(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", counted)
    list(read_paths([many / "b.txt"]))
    assert not started
    list(read_paths([many]))
    list(Intake(sorted(many.iterdir()), Shard()))
    assert len(started) == 2
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2  # ended and waited


def test_a_reader_that_is_left_ends_the_process(many):
    others = children()  # of other tests
    found = read_paths([many])
    reading = iter(found)
    next(reading)
    started = children() - others
    assert started
    reading.close()
    assert not started & children()


def children():
    tasks = Path("/proc/self/task").glob("*/children")
    return {int(pid) for task in tasks for pid in task.read_text().split()}


def bomb(folder):
    """A file of 10 MB that takes hundreds of them to parse."""
    (folder / "bomb.html").write_text("<p>a<i>b</i>" * 800_000)


def test_a_file_that_takes_too_much_memory_is_left_out_alone(many):
    bomb(many)
    found = texts(read_paths([many], parse_bytes=256 << 20))
    assert found[:5] == [
        "of html",
        "of text",
        "takes more than 0.25 GiB of memory to parse; split the file, or raise parse_bytes",
        "of pdf\n\nsecond",
        "of docx",
    ]


def test_a_file_that_takes_too_long_is_left_out_alone(many):
    bomb(many)
    found = texts(read_paths([many], parse_seconds=0.05))
    assert "of text" in found
    assert (
        "took more than 0.05 s to parse; split the file or save it anew, or raise parse_seconds"
        in found
    )


def test_the_process_waits_for_neither_jax_nor_a_tokenizer():
    program = (
        "import sys, jaxrag.library.documents.parser_process; "
        "print({'jax', 'numpy', 'tokenizers', 'lxml', 'pypdfium2'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def test_an_interrupt_leaves_no_process(tmp_path):
    os.mkfifo(tmp_path / "endless")
    (tmp_path / "run.py").write_text(
        "import pathlib, signal, sys\n"
        "from jaxrag.library.documents.files import ReadOptions\n"
        "from jaxrag.library.documents.parser import ParseLimits, Parser\n"
        # A shell makes what it runs behind its back ignore interrupts.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "with Parser(ParseLimits()) as parser:\n"
        "    def look():\n"
        "        print(parser.pid, flush=True)\n"
        "        return True\n"
        "    list(parser.parse(pathlib.Path(sys.argv[1]), 'a.html', 'a', ReadOptions(),"
        " wanted=look))\n"
    )
    program = [sys.executable, tmp_path / "run.py", tmp_path / "endless"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        pid = int(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        assert b"KeyboardInterrupt" in process.stderr.read()
    assert not Path(f"/proc/{pid}").exists()
