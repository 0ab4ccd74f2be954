"""Who uses a repository: written down, found by others, struck out; nothing else is touched."""

from refusal import refused

from jaxrag.base.errors import StoreError
from jaxrag.kv.store.owners import Owner, Owners, this_owner

MODEL, OTHER = "a" * 64, "b" * 64
ONE, TWO = Owner("1" * 32, "host", "/one"), Owner("2" * 32, "host", "/two")


def test_owners_come_and_go(tmp_path):
    owners = Owners(tmp_path, MODEL)
    assert owners.all() == []
    for owner in (TWO, ONE, ONE):
        owners.register(owner)
    assert Owners(tmp_path, MODEL).all() == [ONE, TWO]
    assert Owners(tmp_path, OTHER).all() == []
    owners.forget(ONE.id)
    owners.forget(ONE.id)
    assert owners.all() == [TWO]


def test_an_owner_that_moved_is_written_again(tmp_path):
    owners = Owners(tmp_path, MODEL)
    owners.register(ONE)
    moved = Owner(ONE.id, "elsewhere", "/new")
    owners.register(moved)
    assert owners.all() == [moved]


def test_this_owner_names_this_machine(tmp_path):
    assert this_owner("3" * 32, tmp_path) == this_owner("3" * 32, tmp_path)
    assert this_owner("3" * 32, tmp_path).folder == str(tmp_path)


def test_a_damaged_owner_is_never_taken_for_none(tmp_path):
    owners = Owners(tmp_path, MODEL)
    owners.register(ONE)
    (file,) = tmp_path.rglob("owner.json")
    for damage in (b"", b"{", b"[]", b"{}"):
        file.write_bytes(damage)
        with refused(StoreError):
            owners.all()


def test_changes_are_counted_and_never_count_back(tmp_path):
    owners = Owners(tmp_path, MODEL)
    owners.register(ONE)
    assert owners.changes(ONE.id) == 0
    for count in (1, 3, 2):
        owners.acknowledge(ONE.id, count)
    assert Owners(tmp_path, MODEL).changes(ONE.id) == 3
    assert (owners.changes(TWO.id), owners.all()) == (0, [ONE])
    owners.forget(ONE.id)
    assert owners.changes(ONE.id) == 0


def test_a_damaged_count_is_never_taken_for_another(tmp_path):
    owners = Owners(tmp_path, MODEL)
    owners.acknowledge(ONE.id, 42)
    (file,) = tmp_path.rglob("changes.json")
    whole = file.read_bytes()
    flips = [bytes([*whole[:n], whole[n] ^ 1, *whole[n + 1 :]]) for n in range(len(whole))]
    for damage in (*flips, b"", b"{}", whole[:-1]):
        file.write_bytes(damage)
        with refused(StoreError):
            owners.changes(ONE.id)
