"""Files and vector stores as plain classes: what is in progress, dropped, removed and taken up."""

import contextlib
import dataclasses
import os
import threading

import pytest
from refusal import refused
from serving import until

from jaxrag.base.errors import ConfigError
from jaxrag.engine.engine import Engine
from jaxrag.library.documents import BadDocument, parser, parser_process
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.library.options import KnowledgeBaseOptions
from jaxrag.server.errors import Problem
from jaxrag.server.settings import ServerSettings
from jaxrag.server.state import indexing
from jaxrag.server.state.library import Library
from jaxrag.server.state.recipe import recipe_like
from jaxrag.server.tenants import Tenants

LONG = 120.0  # seconds in which what must happen happens
STORY = b"File 23: Giso Berow lives in Tondorf.\n\nFile 18: Mela Forow works as a judge.\n"
RECIPE = KnowledgeBaseOptions(chunk_tokens=20, overlap=0, chunk_by="sentence")


@pytest.fixture(scope="module")
def model(served_model):
    """With an engine of its own, which the tests may hold up."""
    model = dataclasses.replace(served_model)
    model.engine = Engine(model)
    return model


class Here:
    """A parser without a process, which would be most of the time of these tests."""

    def __init__(self, limits, tokenizer):
        self._cut = parser_process._cutter(tokenizer.to_json())

    def close(self):
        pass

    def parse(self, path, filename, name, options, reported=None, *, chunking, wanted):
        job = {"path": path, "filename": filename, "name": name, "reported": reported,
               "options": dataclasses.asdict(options),
               "chunking": dataclasses.asdict(chunking)}  # fmt: skip
        for told in parser_process._messages(job, self._cut):
            if "document" in told:
                yield parser._parsed(told["document"])
            else:
                yield BadDocument(**told["bad"])


@pytest.fixture
def open_library(model, tmp_path, monkeypatch):
    """``open_library(served={}, **settings)``: a library over one data folder."""
    monkeypatch.setattr(indexing, "Parser", Here)
    with contextlib.ExitStack() as stack:

        def make(served=None, recipe=RECIPE, **settings):
            settings = {"index_threads": 1, "grace_seconds": 0.0, **settings}
            data = tmp_path / "data"
            tenants = Tenants.open(None, data)
            made = Library(
                ServerSettings(data=str(data), **settings), model, served or {}, recipe, tenants
            )
            stack.callback(made.close)
            return made, tenants.access(None)

        yield make


def uploaded(library, access, data=STORY, name="story.txt"):
    upload = library.begin(access)
    upload.write(data)
    return upload.finish(name, "assistants").id


def settled(library, store):
    until(lambda: not library.registry.counts(store)["in_progress"])
    members = library.registry.members(store)
    return {member.file: member.message or member.status for member in members}


@contextlib.contextmanager
def held(engine):
    """The engine's thread does nothing but wait until the block is left."""
    begun, go = threading.Event(), threading.Event()

    def wait(runner):
        begun.set()
        assert go.wait(LONG)

    thread = threading.Thread(target=engine.call, args=(wait,))
    thread.start()
    assert begun.wait(LONG)
    try:
        yield
    finally:
        go.set()
        thread.join()


def works_on(library):
    return [job for job, future in list(library.indexer._jobs.items()) if future.running()]


def dropped(library, *files):
    """None of these is worked on and wanted."""
    return not any(job.wanted and job.member.file in files for job in works_on(library))


def found(library, access, store):
    base = library.base(library.shelf(access, store))
    return {hit.document_id[:29] for hit in base.search("Giso Berow", 50)}


def test_what_is_in_progress_when_a_server_ends_the_next_one_takes_up(open_library, model):
    library, access = open_library()
    store = library.create(access, "notes", {}).name
    with held(model.engine):
        stories = [STORY.replace(b"23", b"%d" % number) for number in (23, 24, 25)]
        files = [uploaded(library, access, it) for it in stories]
        library.put(access, store, [(file, {}) for file in files])
        until(lambda: works_on(library))
        closing = threading.Thread(target=library.close)
        closing.start()
    closing.join()
    again, access = open_library()
    assert settled(again, store) == dict.fromkeys(files, "completed")
    assert found(again, access, store) == set(files)


def test_a_file_that_is_taken_out_while_it_is_indexed_is_not_found(open_library, model):
    library, access = open_library()
    store = library.create(access, "notes", {}).name
    files = [uploaded(library, access) for _ in range(3)]
    with held(model.engine):
        library.put(access, store, [(file, {}) for file in files])
        until(lambda: works_on(library))
        library.remove_file(access, files[1])  # it waits for its turn, and is not begun
        gone = threading.Thread(target=library.take_out, args=(access, store, files[0]))
        gone.start()
        until(lambda: dropped(library, files[0]))
    gone.join()
    assert settled(library, store) == {files[2]: "completed"}
    assert found(library, access, store) == {files[2]}


@pytest.mark.parametrize("encodes", [False, True])
def test_a_batch_that_is_cancelled_leaves_nothing_to_be_found(open_library, model, encodes):
    library, access = open_library()
    store = library.create(access, "notes", {}).name
    files = [uploaded(library, access) for _ in range(2)]
    with held(model.engine):
        library.put(access, store, [(file, {}) for file in files], "vsfb_1")
        until(lambda: works_on(library))
        if encodes:
            until(lambda: model.engine._mail._events)  # the last that a short file asks of it
        cancel = threading.Thread(target=library.cancel_batch, args=(access, store, "vsfb_1"))
        cancel.start()
        until(lambda: dropped(library, *files))
    cancel.join()
    assert set(settled(library, store).values()) == {"cancelled"}
    assert found(library, access, store) == set()


def test_a_vector_store_that_is_removed_while_it_is_filled_goes_from_the_disk(open_library, model):
    library, access = open_library()
    store = library.create(access, "notes", {}).name
    file = uploaded(library, access)
    folder = library._folder("", store)
    with held(model.engine):
        library.put(access, store, [(file, {})])
        until(lambda: works_on(library))
        gone = threading.Thread(target=library.remove, args=(access, store))
        gone.start()
        until(lambda: dropped(library, file))
    gone.join()
    with pytest.raises(Problem) as caught:
        library.shelf(access, store)
    assert caught.value.status == 404
    until(lambda: not folder.exists())


def test_what_was_made_and_never_acknowledged_is_swept(open_library):
    library, access = open_library()
    store = library.create(access, "notes", {}).name
    stray = library._folder("", "vs_stray")
    stray.mkdir()
    (stray / "catalog.sqlite").touch()
    library.close()
    again, access = open_library()
    assert not stray.exists()
    assert [shelf.name for shelf in again.shelves(access)] == [store]


def test_one_server_has_a_data_folder(open_library, tmp_path):
    library, _ = open_library()
    with refused(ConfigError):
        open_library()
    library.close()
    open_library()


def test_the_salt_of_a_tenant_is_in_the_keys_of_its_kv(open_library):
    library, access = open_library()
    stores = [library.create(access, "a", {}).name, library.create(access, "b", {}).name]
    other = dataclasses.replace(access, tenant="blue")
    stores.append(library.create(other, "c", {}).name)
    bases = [library.base(library.shelf(access, name)) for name in stores[:2]]
    bases.append(library.base(library.shelf(other, stores[2])))
    prints = [base.store.fingerprint for base in bases]
    assert prints[0] == prints[1] != prints[2]
    assert prints[0] != library.model.fingerprint


def test_tenants_take_turns(open_library, model):
    """Who sends much does not keep another waiting for all of it."""
    library, access = open_library()
    other = dataclasses.replace(access, tenant="blue")
    ended, settle = [], library.registry.settle_member

    def settled_member(number, *args, **kwargs):
        ended.append(number)
        return settle(number, *args, **kwargs)

    library.registry.settle_member = settled_member
    stores = [library.create(who, "notes", {}).name for who in (access, other)]
    with held(model.engine):
        many = library.put(access, stores[0], [(uploaded(library, access), {}) for _ in range(4)])
        few = library.put(other, stores[1], [(uploaded(library, other), {})])
    until(lambda: len(ended) == 5)
    assert ended.index(few[0].number) <= 2
    assert [number for number in ended if number != few[0].number] == [it.number for it in many]


def test_removed_documents_leave_the_disk_after_the_grace(open_library):
    library, access = open_library()
    store = library.create(access, "notes", {}).name
    file = uploaded(library, access)
    library.put(access, store, [(file, {})])
    settled(library, store)
    base = library.base(library.shelf(access, store))
    before = len(list(base.store.records()))
    library.take_out(access, store, file)
    until(lambda: len(list(base.store.records())) < before)


def test_a_new_vector_store_is_made_as_what_is_served(open_library, model, village):
    with KnowledgeBase.open(village, model) as served:
        library, access = open_library({"village": served}, recipe_like(served))
        made = library.base(library.create(access, "notes", {}))
        assert made.template == served.template and made.chunking == served.chunking
        assert made.encoders == served.encoders


def test_a_knowledge_base_that_is_read_only_takes_no_files(open_library, model, village):
    with KnowledgeBase.open(village, model, mode="r") as served:
        library, access = open_library({"village": served})
        file = uploaded(library, access)
        with pytest.raises(Problem) as caught:
            library.put(access, "village", [(file, {})])
        assert caught.value.status == 403


def test_a_file_whose_bytes_are_gone_fails_and_says_so(open_library):
    library, access = open_library()
    store = library.create(access, "notes", {}).name
    file = uploaded(library, access)
    os.unlink(library.uploads.path(library.file(access, file)))
    library.put(access, store, [(file, {})])
    assert "cannot be read" in settled(library, store)[file]
    assert library.registry.member(store, file).status == "failed"
