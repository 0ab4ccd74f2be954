"""What the command line says of a damaged catalog, and of one from before checksums."""

import contextlib
import json
import shutil
from pathlib import Path

import apsw
import numpy as np
import pytest

from jaxrag.cli import main
from jaxrag.library.catalog import Catalog
from jaxrag.library.catalog.pages import PAGE_BYTES

GOLDEN = Path(__file__).parent / "goldens" / "catalog" / "format3.sqlite"
UNCHECKED = (
    "note: catalog of format 3: rows are not checked; `jaxrag kb verify --repair` adds digests"
)
POOL = ("--cache-tokens", "2048")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model_dir):
    """The folder of a knowledge base that nobody may change."""
    folder = tmp_path_factory.mktemp("damage")
    texts = folder / "texts"
    texts.mkdir()
    for number in range(6):
        words = "The salt well of Yanjing. " * 40
        (texts / f"d{number}.txt").write_text(f"unique{number} {words}")
    made = ["--kb", folder / "kb", "--model", model_dir, "--template", "plain"]
    assert main([*map(str, ["ingest", texts, *made, "--chunk-tokens", "512"])]) == 0
    return folder / "kb"


@pytest.fixture
def kb(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "kb")


@pytest.fixture
def jaxrag(capsys):
    """Run the program in this process: exit code, stdout, stderr."""

    def call(*arguments):
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def spoil(kb, change):
    """Change the pages of the catalog, uint8 [P, PAGE_BYTES]; returns the bytes of before."""
    path = kb / "catalog.sqlite"
    before = path.read_bytes()
    pages = np.frombuffer(bytearray(before), np.uint8).reshape(-1, PAGE_BYTES)
    change(pages)
    path.write_bytes(pages.tobytes())
    return before


def test_a_flipped_bit_is_told_and_turned_back(jaxrag, kb):
    listed = jaxrag("kb", "list", kb)

    def flip(pages):
        pages[0, 401] ^= 4

    before = spoil(kb, flip)
    code, out, err = jaxrag("kb", "list", kb)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert f"run `jaxrag kb verify --repair {kb}`, or restore a copy" in err
    code, out, _ = jaxrag("kb", "verify", kb, "--repair", *POOL)
    assert code == 0
    assert out.startswith("catalog: 1 page mended, 0 unreadable; the damaged file is kept as ")
    assert (kb / "catalog.sqlite").read_bytes() == before
    assert jaxrag("kb", "list", kb) == listed


def test_lost_documents_are_named_and_can_be_added_again(jaxrag, kb, whole, model_dir):
    def blank(pages):
        (number,) = np.flatnonzero([b"unique3 " in page.tobytes() for page in pages])[-1:]
        pages[number, 50:4000] ^= 0x55

    spoil(kb, blank)
    code, out, _ = jaxrag("kb", "verify", kb, "--repair", "--json", *POOL)
    salvaged = json.loads(out)["catalog"]
    assert (code, salvaged["mended"], salvaged["unreadable"]) == (3, 0, 1)
    assert (kb / "catalog.sqlite.damaged").is_file()
    lost = salvaged["lost"]
    assert lost
    assert salvaged["documents"] == 6 - len(lost)
    code, out, _ = jaxrag("kb", "verify", kb)
    assert code == 0
    texts = whole.parent / "texts"
    code, out, _ = jaxrag("ingest", texts, "--kb", kb, "--model", model_dir, "--json")
    report = json.loads(out)
    assert (code, report["documents"], report["unchanged"]) == (0, 6, 6 - len(lost))
    assert report["encoded"] == 0, "their KV was in the store all the time"


def test_what_cannot_be_repaired_is_refused_in_a_line(jaxrag, kb):
    path = kb / "catalog.sqlite"
    path.write_bytes(b"")
    for command in ("stats", "verify"):
        code, out, err = jaxrag("kb", command, kb)
        assert (code, out, err.count("\n")) == (1, "", 1)
    code, out, err = jaxrag("kb", "verify", kb, "--repair", *POOL)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "0 bytes, nothing can be read of it" in err


def as_format_3(path):
    """Write the catalog anew as it was before checksums: in the golden file's tables."""
    old = path.with_name("old.sqlite")
    flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE | apsw.SQLITE_OPEN_URI
    with contextlib.closing(apsw.Connection(str(old), flags=flags)) as made:
        golden = f"file:{GOLDEN}?immutable=1"
        made.execute("ATTACH ? AS golden", (golden,))
        made.execute("ATTACH ? AS new", (str(path),))
        rows = made.execute("SELECT sql FROM golden.sqlite_master WHERE sql NOT NULL").fetchall()
        for (statement,) in rows:
            made.execute(statement)
        tables = made.execute("SELECT name FROM main.sqlite_master WHERE type = 'table'").fetchall()
        for (name,) in tables:
            columns = made.execute(f"PRAGMA main.table_info({name})").fetchall()
            listed = ", ".join(column[1] for column in columns)
            made.execute(f"INSERT INTO main.{name} SELECT {listed} FROM new.{name}")
        for pragma in ("application_id", "user_version"):
            (value,) = made.execute(f"PRAGMA golden.{pragma}").fetchone()
            made.execute(f"PRAGMA main.{pragma} = {value}")
        made.execute("PRAGMA main.journal_mode = WAL").fetchall()
    old.replace(path)


def test_format_3_is_told_and_upgraded_by_a_repair(jaxrag, kb):
    listed = jaxrag("kb", "list", kb)
    as_format_3(kb / "catalog.sqlite")
    assert jaxrag("kb", "list", kb) == listed
    for command in ("stats", "verify"):
        code, _, err = jaxrag("kb", command, kb)
        assert (code, err) == (0, f"{UNCHECKED}\n")
    code, _, err = jaxrag("kb", "verify", kb, "--repair", *POOL)
    assert (code, err) == (0, "")
    assert jaxrag("kb", "stats", kb)[2] == ""
    assert jaxrag("kb", "list", kb) == listed


def test_format_3_is_upgraded_by_an_add_where_nobody_else_has_it_open(jaxrag, kb, whole, model_dir):
    listed = jaxrag("kb", "list", kb)
    as_format_3(kb / "catalog.sqlite")
    added = ("ingest", whole.parent / "texts", "--kb", kb, "--model", model_dir)
    with contextlib.closing(Catalog.open(kb / "catalog.sqlite")):
        code, _, err = jaxrag(*added)
        assert (code, err.splitlines()[-1]) == (0, UNCHECKED)
    code, _, err = jaxrag(*added)
    assert code == 0
    assert UNCHECKED not in err
    assert jaxrag("kb", "list", kb) == listed
    assert jaxrag("kb", "verify", kb)[0] == 0
