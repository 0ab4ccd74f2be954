"""Clocks that are wrong, descriptors that run out, files that may not grow: nothing is lost.

A full disk and a read-only one are mounted in tests/library/knowledge_base/test_failures.py.
"""

import contextlib
import os
import resource
import time

import bases
import pytest

from jaxrag.base.errors import JaxragError
from jaxrag.serve.generate import generate

YEAR = 31_557_600.0
BASE = bases.BASES["native"]
QUESTION = bases.document_text(1, 0)[:50]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("resources") / "model"
    bases.make_model(directory)
    return bases.load(directory)


@pytest.fixture
def folder(tmp_path, model):
    """A knowledge base of four documents, whose programs are compiled."""
    with BASE.open(tmp_path / "kb", model) as kb:
        kb.add([bases.as_document(number, 0) for number in range(4)])
        ask(kb)
    return tmp_path / "kb"


def ask(kb):
    """An answer over chunks that stand from the beginning, and whether their KV was there."""
    first = [entry.id for entry in kb.documents()][:4]
    texts = [chunk.text for it in first[:2] for chunk in kb._catalog.chunks(it)]
    answer = generate(QUESTION, kb=kb, documents=texts[:3], max_new_tokens=4)
    return answer.token_ids, [note for note in answer.notes if "not in the store" in note]


CLOCKS = {
    "before 1970": lambda now: now - 70 * YEAR,
    "after 2106": lambda now: now + 90 * YEAR,
    "ten years back": lambda now: now - 10 * YEAR,
    "ten years ahead": lambda now: now + 10 * YEAR,
}


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_wrong_clock_loses_nothing(folder, model, monkeypatch, clock):
    """What was written by the right clock stands under the wrong one, and the other way round."""
    with BASE.open(folder, model) as kb:
        right, _ = ask(kb)
    now = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: CLOCKS[clock](now()))
        with BASE.open(folder, model) as kb:
            kb.add([bases.as_document(4, 0)])
            bases.forget(model)
            assert ask(kb) == (right, [])
            kb.gc()
            assert kb.verify().damaged == ()
    with BASE.open(folder, model) as kb:
        kb.add([bases.as_document(5, 0)])
        kb.gc()
        report = kb.verify()
        assert report.damaged == ()
        assert report.ok == kb.stats()["chunks"]
        bases.forget(model)
        assert ask(kb) == (right, [])
        assert len(kb.documents()) == 6


@contextlib.contextmanager
def limited(what, soft):
    """A soft limit of this process."""
    before = resource.getrlimit(what)
    resource.setrlimit(what, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


@contextlib.contextmanager
def few_descriptors(spare):
    """Only so many more files may be opened."""
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as stack:
        last = 0
        while last < highest + 1:  # fill the gaps
            last = os.dup(0)
            stack.callback(os.close, last)
        stack.enter_context(limited(resource.RLIMIT_NOFILE, last + 1 + spare))
        yield


def tried(act):
    """None, or the line that it was refused with."""
    try:
        act()
    except JaxragError as error:
        assert "\n" not in str(error)
        return str(error)
    return None


@pytest.mark.parametrize("spare", [1, 6, 64])
def test_descriptors_that_run_out_lose_nothing(folder, model, spare):
    with BASE.open(folder, model) as kb:
        right, _ = ask(kb)
    standing = {bases.document_id(number) for number in range(4)}
    told = []

    def add(number):
        with BASE.open(folder, model) as kb:
            kb.add([bases.as_document(number, 0)])
        standing.add(bases.document_id(number))

    def answer():
        bases.forget(model)
        with BASE.open(folder, model) as kb:
            assert ask(kb)[0] == right

    with few_descriptors(spare):
        told += [tried(lambda number=number: add(number)) for number in range(4, 7)]
        told += [tried(answer)]
    assert spare > 1 or None not in told
    assert spare < 64 or told == [None] * 4
    with BASE.open(folder, model) as kb:
        assert standing <= {entry.id for entry in kb.documents()}
        assert kb.verify().damaged == ()
        kb.add([bases.as_document(number, 0) for number in range(4, 7)])
        assert len(kb.documents()) == 7
        bases.forget(model)
        assert ask(kb) == (right, [])


def test_files_that_may_not_grow_are_told_and_lose_nothing(folder, model):
    size = (folder / "catalog.sqlite").stat().st_size
    standing, told = {bases.document_id(number) for number in range(4)}, None
    with BASE.open(folder, model) as kb:
        right, _ = ask(kb)
        with limited(resource.RLIMIT_FSIZE, size + 30_000):
            for number in range(4, 60):
                told = tried(lambda number=number: kb.add([bases.as_document(number, 0)]))
                if told:
                    break
                standing.add(bases.document_id(number))
            assert ask(kb) == (right, [])
    assert told is not None
    with BASE.open(folder, model) as kb:
        assert standing <= {entry.id for entry in kb.documents()}
        assert kb.verify().damaged == ()
        kb.add([bases.as_document(99, 0)])
        bases.forget(model)
        assert ask(kb) == (right, [])
