"""Files whose readers only the extra "documents" brings."""

import importlib.metadata
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from jaxrag.library.documents import BadDocument, Document, read_paths
from jaxrag.library.documents.readers import READERS

ROOT = Path(__file__).parents[3]
NEEDS = {suffix: reader.needs for suffix, reader in READERS.items() if reader.needs}
INSTALL = "`pip install docutils openpyxl orgparse pypdfium2 python-docx python-pptx`"


def _without_extra(tmp_path_factory):
    """Maps a folder of modules to one with links to those that the extra does not bring."""

    def mapped(folder):
        if "site-packages" not in folder:
            return folder
        made = tmp_path_factory.mktemp("site")
        for entry in Path(folder).iterdir():
            if entry.name not in NEEDS.values():
                (made / entry.name).symlink_to(entry)
        return str(made)

    return mapped


def test_a_file_without_its_reader_is_refused_alone(tmp_path, tmp_path_factory, monkeypatch):
    """In the process that parses, as on a machine without the extra; others are read."""
    (tmp_path / "a.pdf").write_bytes(b"%PDF-1.7\n")
    (tmp_path / "b.ipynb").write_text('{"cells": [{"cell_type": "markdown", "source": "Wells"}]}')
    (tmp_path / "c.txt").write_text("Wells")
    (tmp_path / "d.org").write_text("* Wells")
    monkeypatch.setattr(sys, "path", [*map(_without_extra(tmp_path_factory), sys.path)])
    pdf, notebook, text, org = read_paths([tmp_path])
    reason = f"pypdfium2 is not installed; {INSTALL} does it"
    assert pdf == BadDocument(str(tmp_path / "a.pdf"), reason)
    assert isinstance(notebook, Document) and isinstance(text, Document)
    assert org.reason.startswith("orgparse is not installed; ")


@pytest.mark.parametrize("suffix", NEEDS)
def test_the_refusal_names_package_and_extra(suffix, read, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, NEEDS[suffix], None)
    path = tmp_path / f"wells{suffix}"
    path.write_bytes(b"any")
    good, [bad] = read(path)
    assert not good
    assert bad.reason == f"{NEEDS[suffix]} is not installed; {INSTALL} does it"


def test_the_extra_is_what_the_readers_need():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = {Requirement(line).name for line in project["optional-dependencies"]["documents"]}
    bring = importlib.metadata.packages_distributions()
    assert {name for package in NEEDS.values() for name in bring[package]} == extra
    assert not extra & {Requirement(line).name for line in project["dependencies"]}
