"""The engine of a model that several processes hold, led by one of them."""

import json
import sys
from pathlib import Path

import jax
import pytest

from jaxrag import generate
from jaxrag.models.export import export_hf
from jaxrag.models.model import load_model
from jaxrag.models.reading import Reading
from jaxrag.models.spec import init_params

PROGRAM = Path(__file__).with_name("ranks_program.py")
DOCUMENTS = [
    "Salt is worked at the wells by hands that ask for wool.",
    "The river is crossed on a raft, and the raft is pulled by a rope.",
]
QUESTIONS = ["Who has the salt?", "What is the raft?", "Who has the rope?"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, tiny_config, tokenizer_dir):
    config = tiny_config(
        vocab_size=600, num_layers=2, num_heads=8, num_kv_heads=4, max_positions=512
    )
    folder = tmp_path_factory.mktemp("wide") / "llama"
    params = init_params(config, jax.random.key(5))
    export_hf(folder, params, config, tokenizer_dir, reading=Reading(("reordered",)))
    return folder


def test_two(model_dir, run_processes, tmp_path):
    work = {
        "processes": 2, "mesh": (1, 1, 2), "model": str(model_dir), "pool": 1024,
        "method": "turborag", "tokens": 6, "documents": DOCUMENTS, "questions": QUESTIONS,
    }
    path = tmp_path / "work.json"
    path.write_text(json.dumps(work))
    run_processes(
        lambda rank, coordinator: [sys.executable, PROGRAM, str(rank), coordinator, path],
        tmp_path, count=2, devices=1,
    )
    found = json.loads(path.with_suffix(".json.out").read_text())
    model = load_model(model_dir, cache_tokens=1024)
    wanted = generate(QUESTIONS, model=model, documents=DOCUMENTS, method="turborag", max_new_tokens=6)
    assert found["plain"] == [it.token_ids for it in wanted]
