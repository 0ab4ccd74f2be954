"""Deleting chunks and collecting garbage, beside writers and readers at work."""

import contextlib
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import StoreError
from jaxrag.kv.store import SweepReport

HOUR = 3600.0


def put(store, *chunks):
    for c in chunks:
        assert store.put(c.key, c.kv, record=c.record, aux={"x": np.arange(3)}).won


def everything(record):
    return True


def nothing(record):
    return False


@pytest.fixture
def root(tmp_path):
    return tmp_path / "kb"


@pytest.fixture
def later(monkeypatch):
    """``later(seconds)`` moves this process's clock."""
    real, ahead = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + ahead[0])

    def move(seconds):
        ahead[0] += seconds

    return move


def tree(root):
    return sorted(str(p.relative_to(root)) for p in (root / "kv").rglob("*"))


def attempts(root, c):
    return sorted(p.name for p in root.glob(f"kv/*/*/{c.key}/*") if p.is_dir())


# Deleting


def test_deleting_leaves_no_file_and_no_folder(open_store, chunk, root):
    store, a, b = open_store(), chunk(1), chunk(2)
    put(store, a)
    before = tree(root)
    put(store, b)
    assert store.delete([b.key]) == 1
    assert tree(root) == before
    assert store.delete([a.key]) == 1
    assert not (root / "kv").exists()
    put(store, a)
    a.assert_equal(store.get(a.key))


def test_deleting_spares_the_attempts_of_others(open_store, chunk, root):
    store, c = open_store(), chunk(1)
    attempt = store.begin(c.key, 7, c.record, ways=1)
    shard = store.put_shard(attempt, 0, c.kv)
    put(store, c)
    assert store.delete([c.key]) == 1
    assert attempts(root, c) == [attempt.attempt]
    assert store.commit(attempt, [shard]).won  # there is no chunk, as when it was begun
    c.assert_equal(store.get(c.key))


def test_a_reader_that_found_the_record_gets_all_or_nothing(open_store, chunk, monkeypatch):
    store, a, b = open_store(), chunk(1), chunk(2)
    put(store, a, b)
    find = store._find

    def found_then_deleted(keys):
        found = find(keys)
        open_store().delete([a.key])
        return found

    monkeypatch.setattr(store, "_find", found_then_deleted)
    got = store.get_many([a.key, b.key], on_missing="skip")
    assert got.missing == (a.key,)
    b.assert_equal(got.kv)


# Collecting


def test_only_what_is_not_live_and_old_goes(open_store, chunk, root, later):
    store, keep, drop = open_store(), chunk(1), chunk(2)
    put(store, keep, drop)
    record = store.head([drop.key])[0]
    assert store.gc(nothing, grace_seconds=HOUR) == SweepReport()
    later(2 * HOUR)
    young = chunk(3)
    put(store, young)
    expected = SweepReport(chunks=1, nbytes=record.nbytes)
    live = {keep.key}
    assert store.gc(lambda r: r.key in live, grace_seconds=HOUR, dry_run=True) == expected
    assert len(list(store.keys())) == 3
    assert store.gc(lambda r: r.key in live, grace_seconds=HOUR) == expected
    assert sorted(store.keys()) == sorted([keep.key, young.key])
    assert not list(root.glob(f"kv/*/*/{drop.key}"))
    keep.assert_equal(store.get(keep.key))


def test_what_dead_writers_left_goes_after_the_grace(open_store, chunk, root, later):
    store, c = open_store(), chunk(1)
    put(store, c)
    shard = next((root / "kv").glob(f"*/*/{c.key}/*/c/0/0/0/0/0"))
    files = {p: p.read_bytes() for p in (root / "kv").rglob("*") if p.is_file()}
    store.begin(c.key, 7, c.record, ways=1, replace=True)  # an empty folder
    half = store.begin(c.key, 7, c.record, ways=1, replace=True)
    store.put_shard(half, 0, c.kv)
    lost = chunk(2)
    store.put_shard(store.begin(lost.key, 7, lost.record, ways=1), 0, lost.kv)
    locks = [shard.parent / "0.__lock", root / "jaxrag.json.__lock", root / "kv" / "x.__lock"]
    locks[2] = shard.parents[6] / "commit.json.__lock"
    for lock in locks:
        lock.write_bytes(b"")
    before = tree(root)

    assert store.gc(everything, grace_seconds=HOUR) == SweepReport()
    assert tree(root) == before
    later(2 * HOUR)
    planned = store.gc(everything, grace_seconds=HOUR, dry_run=True)
    assert tree(root) == before
    report = store.gc(everything, grace_seconds=HOUR)
    assert (report.attempts, report.locks, report.folders) == (2, 3, 1)
    assert report.nbytes >= 2 * c.kv.nbytes
    assert (planned.attempts, planned.locks, planned.nbytes) == (2, 3, report.nbytes)
    assert {p: p.read_bytes() for p in (root / "kv").rglob("*") if p.is_file()} == files
    assert not list(root.glob(f"kv/*/*/{lost.key}"))
    assert not (root / "jaxrag.json.__lock").exists()
    assert store.gc(everything, grace_seconds=HOUR) == SweepReport()
    c.assert_equal(store.get(c.key))


def test_a_replaced_attempt_goes(open_store, chunk, root, later):
    store, old, new = open_store(), chunk(1, seed=1), chunk(1, seed=2)
    put(store, old)
    store.put(new.key, new.kv, record=new.record, replace=True)
    assert len(attempts(root, new)) == 2
    later(2 * HOUR)
    assert store.gc(everything).attempts == 1
    new.assert_equal(store.get(new.key))
    assert attempts(root, new) == [store.head([new.key])[0].attempt]


def test_a_damaged_record_goes_with_its_bytes(open_store, chunk, root, later):
    store, c = open_store(), chunk(1)
    put(store, c)
    (commit,) = root.glob(f"kv/*/*/{c.key}/commit.json")
    commit.write_bytes(commit.read_bytes()[:-9])
    assert store.gc(everything, grace_seconds=HOUR) == SweepReport()
    later(2 * HOUR)
    report = store.gc(everything, grace_seconds=HOUR)
    assert (report.damaged, report.attempts) == (1, 1)
    assert not (root / "kv").exists()


def test_files_of_others_stay(open_store, chunk, root, later):
    store, c = open_store(), chunk(1)
    put(store, c)
    key_folder = next(root.glob(f"kv/*/*/{c.key}"))
    mine = [root / "kv" / "notes.txt", key_folder / "notes" / "x", root / "owners" / "a" / "b"]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    later(2 * HOUR)
    assert store.gc(everything) == SweepReport()
    assert all(path.read_text() == "mine" for path in mine)


@pytest.mark.parametrize("grace", [-1, float("nan")])
def test_a_grace_is_a_time(open_store, grace):
    with refused(StoreError, "0"):
        open_store().gc(everything, grace_seconds=grace)


# Races: a collection without grace meets a put at each of its steps


def after(monkeypatch, target, name, action, when=lambda *arguments: True):
    """Run ``action`` once, after the first call of ``target.name`` that ``when`` picks."""
    original = getattr(target, name)

    def patched(*arguments):
        result = original(*arguments)
        if when(*arguments):
            monkeypatch.setattr(target, name, original)
            action()
        return result

    monkeypatch.setattr(target, name, patched)


def collect(store):
    return store.gc(everything, grace_seconds=0)


def prepared(store, c):
    attempt = store.begin(c.key, 7, c.record, ways=1)
    return attempt, [store.put_shard(attempt, 0, c.kv)]


def before_step(patch, store, at, action):
    """Run ``action`` before step ``at`` of what ``store`` does with its files; which it did."""
    done = []

    def watched(name, step):
        def taken(*arguments):
            done.append(name)
            if len(done) == at + 1:
                action()
            return step(*arguments)

        return taken

    for name in ("make_directory", "finish_writes", "write_if", "contents", "read_many", "write",
                 "paths", "delete", "delete_if", "prune", "holds", "names"):  # fmt: skip
        patch.setattr(store._backend, name, watched(name, getattr(store._backend, name)))
    return done


@pytest.mark.parametrize("amid", ["put", "collection"])
def test_a_collection_beside_a_put_keeps_it_whole_or_says_so(open_store, chunk, root, amid):
    """One of the two between any two steps of the other, which has begun already."""
    outcomes = set()
    put(open_store(), chunk(100))  # beside another
    for at in range(100):
        writer, sweeper, c, won = open_store(), open_store(), chunk(at), []
        begun = prepared(writer, c)

        def commit(writer=writer, won=won, begun=begun):
            try:
                won.append(writer.commit(*begun).won)
            except StoreError:
                won.append(False)

        jobs = [(writer, commit), (sweeper, lambda sweeper=sweeper: collect(sweeper))]
        (outer, work), (_, inner) = jobs if amid == "put" else jobs[::-1]
        with pytest.MonkeyPatch.context() as patch:
            done = before_step(patch, outer, at, inner)
            work()
        if len(done) <= at:
            break
        outcomes.add(won[0])
        assert [it is not None for it in open_store("r").head([c.key])] == won
        if not won[0]:
            put(open_store(), c)
        c.assert_equal(open_store("r").get(c.key))
        assert not [path for path in tree(root) if "swept" in path]
        open_store().delete([c.key])
    assert at > 1 and outcomes == {True, False}


def test_the_mark_is_lifted_from_what_is_kept(open_store, chunk, root, monkeypatch):
    """The writer commits behind the mark and has not looked for it when gc looks."""
    writer, c, sweeper = open_store(), chunk(1), open_store()
    begun = prepared(writer, c)

    def commit():
        monkeypatch.setattr(type(writer._space), "complete", lambda space, record: True)
        assert writer.commit(*begun).won

    after(monkeypatch, sweeper._backend, "write", commit)
    assert collect(sweeper) == SweepReport()
    c.assert_equal(writer.get(c.key))
    assert not [path for path in tree(root) if "swept" in path]


def test_the_mark_of_a_collection_that_died_goes_with_the_attempt(
    open_store, chunk, root, later, monkeypatch
):
    store, c = open_store(), chunk(1)
    prepared(store, c)

    class Killed(Exception):
        pass

    def die(*arguments):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(store._backend, "delete", die)
        collect(store)
    later(2 * HOUR)
    assert collect(open_store()).attempts == 1
    assert not (root / "kv").exists()


def test_two_collections_at_once_keep_their_own_marks(open_store, chunk, monkeypatch):
    """The second has looked for a commit when the first lifts its mark."""
    writer, c, first, second = open_store(), chunk(1), open_store(), open_store()
    attempt = writer.begin(c.key, 7, c.record, ways=1)
    inside = writer._space.attempt(c.key, attempt.attempt)
    writer._backend.write(inside + "aux/x", b"")  # something to list; no file of the array
    won = []
    original = second._backend.paths

    def paths(path):
        if path == inside:
            monkeypatch.setattr(second._backend, "paths", original)
            collect(first)
            shard = writer.put_shard(attempt, 0, c.kv)
            with contextlib.suppress(StoreError):
                won.append(writer.commit(attempt, [shard]).won)
        return original(path)

    monkeypatch.setattr(second._backend, "paths", paths)
    collect(second)
    assert won == []
    assert writer.head([c.key]) == [None]


def test_begun_before_and_written_behind_the_listing(open_store, chunk, root, monkeypatch):
    """Nothing of the attempt was there to be removed, so whatever comes later must stay."""
    writer, c, sweeper = open_store(), chunk(1), open_store()
    attempt = writer.begin(c.key, 7, c.record, ways=1)
    (root / sweeper._space.attempt(c.key, attempt.attempt) / "zarr.json").write_text("{}")
    inside = sweeper._space.attempt(c.key, attempt.attempt)
    results = []

    def write():
        with contextlib.suppress(StoreError):
            results.append(writer.commit(attempt, [writer.put_shard(attempt, 0, c.kv)]))

    after(monkeypatch, sweeper._backend, "paths", write, lambda path: path == inside)
    collect(sweeper)
    assert not results
    assert writer.head([c.key]) == [None]

    attempt = writer.begin(c.key, 7, c.record, ways=1)
    (root / sweeper._space.attempt(c.key, attempt.attempt) / "zarr.json").write_text("{}")
    original = sweeper._backend.prune

    def prune(path):
        write()  # the mark is gone
        original(path)

    monkeypatch.setattr(sweeper._backend, "prune", prune)
    collect(sweeper)
    assert [result.won for result in results] == [True]
    c.assert_equal(writer.get(c.key))


def test_a_chunk_that_became_live_while_it_was_removed_stays(open_store, chunk, root):
    store, c = open_store(), chunk(1)
    put(store, c)
    asked = []

    def live(record):
        asked.append(open_store("r").head([c.key]) != [None])
        return len(asked) > 1

    assert store.gc(live, grace_seconds=0) == SweepReport()
    assert asked == [True, False]  # the second time nobody can find it
    c.assert_equal(store.get(c.key))


def test_a_chunk_put_while_it_was_removed_stays(open_store, chunk, root):
    store, old, new = open_store(), chunk(1, seed=1), chunk(1, seed=2)
    put(store, old)
    asked = []

    def live(record):
        asked.append(record)
        if len(asked) == 2:
            put(open_store(), new)
        return len(asked) == 2

    assert store.gc(live, grace_seconds=0).chunks == 1
    new.assert_equal(store.get(new.key))
    assert attempts(root, new) == [store.head([new.key])[0].attempt]


def test_a_lock_that_is_held_stays(open_store, chunk, root):
    store, c = open_store(), chunk(1)
    put(store, c)
    lock = next(root.glob(f"kv/*/*/{c.key}")) / "commit.json.__lock"
    body = "import fcntl, sys\nf = open(sys.argv[1], 'w')\nfcntl.lockf(f, fcntl.LOCK_EX)\n"
    body += "print('held', flush=True)\nsys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", body, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout.readline() == b"held\n"
        assert collect(store).locks == 0
        assert lock.exists()
        holder.stdin.close()
    assert collect(store).locks == 1
    assert not lock.exists()


def test_nothing_acknowledged_is_lost_beside_a_collection_without_grace(open_store, chunk):
    acknowledged = []
    done = threading.Event()

    def write(first):
        store = open_store()
        for number in range(first, first + 25):
            c = chunk(number, 3)
            with contextlib.suppress(StoreError):  # it was swept, and says so
                if store.put(c.key, c.kv, record=c.record).won:
                    acknowledged.append(c)

    def sweep():
        store = open_store()
        while not done.is_set():
            collect(store)

    writers = [threading.Thread(target=write, args=(first,)) for first in (0, 100)]
    sweeper = threading.Thread(target=sweep)
    for thread in (*writers, sweeper):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    sweeper.join()
    store = open_store("r")
    assert acknowledged
    for c in acknowledged:
        c.assert_equal(store.get(c.key))
    assert sorted(store.keys()) == sorted(c.key for c in acknowledged)


def test_what_a_writer_has_announced_stays_at_any_grace(open_store, chunk, root):
    """Its committed chunks, its attempts, and the folders that it has only just made."""
    store, put_already, under_way, begun, dropped = open_store(), *map(chunk, range(1, 5))
    put(store, put_already, dropped)
    attempt = store.begin(under_way.key, 7, under_way.record, ways=1)
    shard = store.put_shard(attempt, 0, under_way.kv)
    empty = store.begin(begun.key, 7, begun.record, ways=1)
    announced = {put_already.key, under_way.key, begun.key}
    time.sleep(0.01)  # folders of this very moment are not old
    report = open_store().gc(nothing, grace_seconds=0, busy=announced.__contains__)
    assert (report.chunks, report.attempts) == (1, 0)
    assert list(store.keys()) == [put_already.key]
    assert store.commit(attempt, [shard]).won
    assert store.commit(empty, [store.put_shard(empty, 0, begun.kv)]).won
    for c in (put_already, under_way, begun):
        c.assert_equal(store.get(c.key))
    assert open_store().gc(nothing, grace_seconds=0).chunks == 3
    assert not (root / "kv").exists()


def test_nested_empty_folders_go_in_one_run(open_store, chunk, root, later):
    store, c = open_store(), chunk(1)
    put(store, c)
    before = tree(root)
    inner = next((root / "kv").glob(f"*/*/{c.key}")) / "/".join("abcdefg")
    inner.mkdir(parents=True)
    (inner / "x.__lock").write_bytes(b"")
    later(2 * HOUR)
    planned = store.gc(everything, grace_seconds=HOUR, dry_run=True)
    assert store.gc(everything, grace_seconds=HOUR) == planned == SweepReport(locks=1, folders=7)
    assert tree(root) == before


def test_a_young_folder_in_an_old_one_stays(open_store, chunk, root, later):
    store, c = open_store(), chunk(1)
    put(store, c)
    outer = next((root / "kv").glob(f"*/*/{c.key}")) / "old"
    (outer / "young").mkdir(parents=True)
    os.utime(outer, (0, 0))
    assert store.gc(everything, grace_seconds=HOUR) == SweepReport()
    assert (outer / "young").is_dir()
