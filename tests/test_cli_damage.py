"""What the command line says of a damaged catalog."""

import json
import shutil

import numpy as np
import pytest

from jaxrag.cli import main
from jaxrag.library.catalog.pages import PAGE_BYTES

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
