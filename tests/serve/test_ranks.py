"""The engine of a model that several processes hold, led by one of them."""

import json
import sys
from pathlib import Path

import jax
import pytest

from jaxrag import Document, KnowledgeBase, generate
from jaxrag.models.export import export_hf
from jaxrag.models.model import load_model
from jaxrag.models.reading import Reading
from jaxrag.models.spec import init_params

PROGRAM = Path(__file__).with_name("ranks_program.py")
DOCUMENTS = [
    "Salt is worked at the wells by hands that ask for wool.",
    "The river is crossed on a raft, and the raft is pulled by a rope.",
]
TOKENS = 24
WINDOW = "sink=4,recent=8"
# By name: the rule, and how the model is loaded.
RULES = {
    "values": ("topn:n=8", {"value_layers": 1}),
    "topn": ("topn:n=8", {}),
    "retrieval": (f"retrieval:k=6,{WINDOW}", {}),
    "away": (f"retrieval:k=6,{WINDOW}", {"kv": "host"}),
    "ivf": (f"ivf:k=6,{WINDOW}", {}),
    "flat": (f"flat:k=6,{WINDOW}", {}),
    "static_window": (f"static_window:{WINDOW}", {}),
    "snapkv": ("snapkv:capacity=12,window=4", {}),
    "infllm": ("infllm:block=4,blocks=2,sink=4,recent=8", {}),
    "quest": ("quest:budget=48,dense_layers=0", {}),
}
QUESTIONS = ["Who has the salt?", "What is the raft?", "Who has the rope?", "What is wool?"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, tiny_config, tokenizer_dir):
    config = tiny_config(
        vocab_size=600, num_layers=2, num_heads=8, num_kv_heads=4, max_positions=512
    )
    folder = tmp_path_factory.mktemp("wide") / "llama"
    params = init_params(config, jax.random.key(5))
    export_hf(folder, params, config, tokenizer_dir, reading=Reading(("reordered",)))
    return folder


@pytest.fixture
def led(model_dir, run_processes, tmp_path):
    """``led(processes, devices, method, **work)``: what the clients of the leader got."""

    def call(processes, devices, method="turborag", **more):
        work = {
            "processes": processes,
            "mesh": (1, 1, processes * devices),
            "model": str(model_dir),
            "pool": 256,
            "method": method,
            "tokens": TOKENS,
            "documents": DOCUMENTS,
            "questions": QUESTIONS,
            **more,
        }
        path = tmp_path / "work.json"
        path.write_text(json.dumps(work))
        run_processes(
            lambda rank, coordinator: [sys.executable, PROGRAM, str(rank), coordinator, path],
            tmp_path,
            count=processes,
            devices=devices,
        )
        return json.loads(path.with_suffix(".out").read_text())

    return call


def served_as(found, wanted, preempts=True):
    """Everybody got these tokens, but for those who left, were stopped or came too late."""
    assert found["plain"] == [wanted, ["length"] * len(QUESTIONS)]
    tokens, how = found["mixed"]
    few, left = len(QUESTIONS), {1: "stop", 3: "Cancelled", 8: "DeadlineExceeded"}
    assert how == [left.get(place, "length") for place in range(2 * few + 1)]
    for place, answer in enumerate(tokens[:-1]):
        full = wanted[place % few]
        assert answer == (full[: len(answer)] if place in left else full)
    assert 2 <= len(tokens[1]) < TOKENS and 2 <= len(tokens[3]) < TOKENS and not tokens[-1]
    assert found["preempted"] >= preempts


@pytest.mark.parametrize(
    ("processes", "method"),
    [
        (2, "turborag"),
        pytest.param(4, "turborag", marks=pytest.mark.slow),
        pytest.param(2, "fusionrag", marks=pytest.mark.slow),
        pytest.param(2, "full_attention", marks=pytest.mark.slow),
    ],
)
def test_processes_answer_as_one_device(led, model_dir, processes, method):
    """With cancellations, early leavers, a deadline and preemption, which the leader orders."""
    model = load_model(model_dir, cache_tokens=1024)
    given = {"documents": DOCUMENTS, "method": method, "max_new_tokens": TOKENS}
    wanted = [it.token_ids for it in generate(QUESTIONS, model=model, **given)]
    served_as(led(processes, 1, method), wanted)


@pytest.mark.parametrize("slow", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_chunks_are_read_while_others_are_served(led, model_dir, slow):
    """A process's store does not answer until somebody else has been served, and two have left."""
    documents = [*DOCUMENTS, "Tea comes over the pass on mules.", "Wool is washed in the river."]
    model = load_model(model_dir, cache_tokens=1024)
    given = {"method": "turborag", "max_new_tokens": TOKENS}
    wanted = [
        generate(question, model=model, documents=[document], **given).token_ids
        for question, document in zip(QUESTIONS, documents, strict=True)
    ]
    found = led(2, 1, documents=documents, slow=slow, pool=1024)
    assert found["first"] == wanted
    assert found["how"] == ["length", "length", "DeadlineExceeded", "Cancelled"]
    assert found["meanwhile"] == [wanted[0], [], [], []]
    assert found["tokens"] == [*wanted[:2], [], []]


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["native", "int8"])
@pytest.mark.parametrize("method", ["turborag", "fusionrag", "cacheblend", "epic"])
def test_processes_read_a_knowledge_base_as_one_device(led, model_dir, tmp_path, method, stored):
    model = load_model(model_dir, cache_tokens=1024)
    encoders = ["isolated", "after_prefix", "neighbours"]
    cut = {"chunk_tokens": 64, "overlap": 0, "encoders": encoders, "stored": stored}
    with KnowledgeBase.open(tmp_path / "kb", model, **cut) as kb:
        kb.add([Document(id=str(at), text=text) for at, text in enumerate(DOCUMENTS)])
        asked = {"method": method, "max_new_tokens": TOKENS}
        wanted = [it.token_ids for it in generate(QUESTIONS, kb=kb, **asked)]
    found = led(2, 1, method, kb=str(tmp_path / "kb"), pool=512)
    served_as(found, wanted, preempts=False)


@pytest.mark.slow
@pytest.mark.parametrize("case", RULES)
def test_processes_decode_by_every_rule_as_one_device(led, model_dir, case):
    rule, placed = RULES[case]
    model = load_model(model_dir, cache_tokens=1024, **placed)
    given = {"documents": DOCUMENTS, "decode": rule, "max_new_tokens": TOKENS}
    wanted = [it.token_ids for it in generate(QUESTIONS, model=model, method="turborag", **given)]
    served_as(led(2, 1, decode=rule, placed=placed), wanted, preempts=not placed)
