"""Who uses a repository: written down, found by others, struck out; nothing else is touched."""

import pytest

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
        with pytest.raises(StoreError, match="damaged"):
            owners.all()
