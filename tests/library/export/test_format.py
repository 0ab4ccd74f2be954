"""docs/format.md names the fields, tables and columns that the code writes, all of them."""

import dataclasses
import json
import re
import sqlite3
from pathlib import Path

import pytest

from jaxrag.kv.store import ChunkStore
from jaxrag.kv.store.owners import Owners, this_owner
from jaxrag.library.catalog import Catalog
from jaxrag.library.export import MANIFEST, KeyPlacement, export_bundles

TEXT = (Path(__file__).parents[3] / "docs" / "format.md").read_text()


def table(heading):
    """The names in the first column of the table behind a heading, and the other cells."""
    rows = re.search(rf"^{heading}\n\n((?:\|.*\n)+)", TEXT, re.M)[1].splitlines()[2:]
    cells = [re.split(r" \| ", row.strip("| ")) for row in rows]
    return {name: rest for first, *rest in cells for name in re.findall(r"`(\w+)`", first)}


def sealed_record(chunks, folder):
    """The record of a chunk of these, put with a secret."""
    layout = chunks.store.layout
    name = chunks.bundles[0].name
    [record] = chunks.store.head([name])
    secret = b"sixteen random bytes"
    store = ChunkStore.open(folder / "sealed", "5e" * 32, layout, mode="rw", secret=secret)
    store.put(name, chunks.kv[0], record=record.provenance)
    (path,) = (folder / "sealed").glob("kv/*/*/*/commit.json")
    return path


@pytest.fixture
def repository(fill, tmp_path):
    chunks, _ = fill()
    return chunks, tmp_path / "store-bfloat16-native"


def test_fields_of_the_json_files(repository, tmp_path):
    chunks, root = repository
    (commit,) = root.glob(f"kv/*/*/{chunks.bundles[0].name}/commit.json")
    owners = Owners(root, chunks.store.fingerprint)
    owners.register(this_owner("0" * 32, tmp_path))
    (layout,) = root.glob("layouts/*.json")
    (owner,) = root.glob("owners/*/*/owner.json")
    whole = table("`commit.json`, the record").keys()
    assert json.loads(commit.read_text()).keys() == whole - {"seal", "seals"}
    commit = sealed_record(chunks, tmp_path)
    for heading, path in (
        ("`jaxrag.json`", root / "jaxrag.json"),
        ("`layouts/<fingerprint>.json`", layout),
        ("`commit.json`, the record", commit),
        ("`owner.json`", owner),
    ):
        only_with_maps = {"rows"}
        found = json.loads(path.read_text()).keys()
        assert table(heading).keys() - only_with_maps == found, path


def test_every_file_stands_in_the_tree(repository):
    chunks, root = repository
    shapes = {
        re.sub(r"/[0-9a-f]{24}/", "/<attempt>/", path.relative_to(root).as_posix())
        for path in root.rglob("*")
        if path.is_file() and ".sqlite" not in path.name  # heat and ledger
    }
    named = chunks.store.fingerprint
    found = {
        re.sub(r"kv/\w{16}/\w\w/\w{40}/", "kv/<fp16>/<k2>/<key>/", path).replace(
            named, "<fingerprint>"
        )
        for path in shapes
    }
    assert found == {
        "jaxrag.json",
        "layouts/<fingerprint>.json",
        "kv/<fp16>/<k2>/<key>/commit.json",
        "kv/<fp16>/<k2>/<key>/<attempt>/zarr.json",
        "kv/<fp16>/<k2>/<key>/<attempt>/c/0/0/0/0/0",
    }


def test_tables_and_columns_of_the_catalog(tmp_path):
    Catalog.create(tmp_path / "catalog.sqlite", {}).close()
    connection = sqlite3.connect(tmp_path / "catalog.sqlite")
    names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master")]
    tables = [name for name in names if not name.startswith("sqlite_")]
    documented = table(r".*in one transaction\.")
    for name in tables:
        if connection.execute(f"PRAGMA table_info({name})").fetchall():
            assert name in documented
    for name in ("settings", "documents", "chunks", "chunk_keys", "contexts"):
        columns = {row[1] for row in connection.execute(f"PRAGMA table_info({name})")}
        assert columns == set(re.findall(r"`(\w+)`", documented[name][0])), name
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    assert f"`user_version` {version}" in TEXT
    connection.close()


def test_fields_of_the_manifest(repository, fill, tmp_path):
    chunks, config = fill()
    placement = KeyPlacement(config, 0)
    export_bundles(chunks.store, chunks.bundles, placement, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    described = set(re.findall(r"`(\w+)`", TEXT[TEXT.index("`manifest.json` holds") :]))
    (file, *_) = manifest["files"]
    for fields in (manifest, manifest["rope"], file, *file["chunks"]):
        assert fields.keys() - {"complete"} <= described


def test_layout_fields_are_those_of_the_class(repository):
    chunks, _ = repository
    fields = {field.name for field in dataclasses.fields(chunks.store.layout)}
    assert table("`layouts/<fingerprint>.json`").keys() == {"format", "fingerprint", *fields}
