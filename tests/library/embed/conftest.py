"""The golden embedders, and copies of them to change."""

import json
import shutil
from pathlib import Path

import pytest

GOLDENS = Path(__file__).parents[2] / "goldens" / "embed"


@pytest.fixture
def embedder_dir(tmp_path):
    """``embedder_dir(name, folder=name)``: a copy of a golden embedder."""

    def copy(name, folder=None):
        return Path(shutil.copytree(GOLDENS / name, tmp_path / (folder or name)))

    return copy


@pytest.fixture
def edit_json():
    """``edit_json(path, **changes)``: change keys of a JSON object; None removes a key."""

    def edit(path, **changes):
        values = {**(json.loads(path.read_text()) if path.is_file() else {}), **changes}
        path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))

    return edit
