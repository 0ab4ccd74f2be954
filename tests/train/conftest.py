"""A small training run: tokenizer, random model, data files, config."""

import json

import pytest

from jaxrag.base.tables import build
from jaxrag.train.config import TrainConfig

ROWS = [
    {
        "chunks": [
            {"title": "Bridge", "text": f"The bridge of town {n} was built in 18{n:02d}."},
            f"The mayor of town {n} is called Person {n}.",
        ],
        "question": f"Who is the mayor of town {n}?",
        "answers": [f"Person {n}"],
    }
    for n in range(40)
]


@pytest.fixture
def write_rows(tmp_path):
    """``write_rows(rows, name)``: a .jsonl file; a row that is text is written as it stands."""

    def write(rows, name="data.jsonl"):
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def cache_home(tmp_path, monkeypatch):
    """Caches of this test only."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def train_values(model_dir, write_rows, cache_home):
    """``train_values(**{"data.rows": 8})``: plain values of a config, with some replaced."""

    def make(**changes):
        values = {
            "model": {"path": str(model_dir)},
            "data": {
                "row_tokens": 256,
                "rows": 4,
                "template": "plain",
                "response_start": " ",
                "sources": [{"name": "towns", "paths": [write_rows(ROWS, "towns.jsonl")]}],
            },
            "optimizer": {"steps": 6, "learning_rate": 1e-2, "warmup_steps": 2},
            "compute": {"dtype": "float32"},
            "run": {"log_every": 1, "save_every": 2},
        }
        for name, value in changes.items():
            *path, last = name.split(".")
            table = values
            for key in path:
                table = table.setdefault(key, {})
            table[last] = value
        return values

    return make


@pytest.fixture
def train_config(train_values):
    """``train_config(**{"data.rows": 8})``: a TrainConfig."""
    return lambda **changes: build(TrainConfig, train_values(**changes), "config")
