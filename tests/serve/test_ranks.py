"""The engine of a model that several processes hold, led by one of them."""

import json
import sys
from pathlib import Path

import pytest

from jaxrag import Document, KnowledgeBase, generate
from jaxrag.models.model import load_model

PROGRAM = Path(__file__).with_name("ranks_program.py")
DOCUMENTS = [
    "Salt is worked at the wells by hands that ask for wool.",
    "The river is crossed on a raft, and the raft is pulled by a rope.",
]
TOKENS = 24
POOL = 384  # tokens: four short prompts fit, eight longer ones do not
THINGS = ["salt", "raft", "rope", "wool", "river", "well", "hand", "tea", "pass", "mule"]
TWENTY = [f"{word} {thing}?" for thing in THINGS for word in ("Who has the", "What is")]
FEW = TWENTY[:4]
OWN = [*DOCUMENTS, "Tea comes over the pass on mules.", "Wool is washed in the river."]
PAIRS = list(zip(FEW, OWN, strict=True))


@pytest.fixture(scope="module")
def led(wide_model_dir, run_processes, tmp_path_factory):
    """``led(processes, devices, method, **work)``: what the clients of the leader got."""

    def call(processes, devices, method="turborag", **more):
        work = {
            "processes": processes,
            "mesh": (1, 1, processes * devices),
            "model": str(wide_model_dir),
            "pool": 256,
            "method": method,
            "tokens": TOKENS,
            "documents": DOCUMENTS,
            **more,
        }
        folder = tmp_path_factory.mktemp("led")
        path = folder / "work.json"
        path.write_text(json.dumps(work))
        run_processes(
            lambda rank, coordinator: [sys.executable, PROGRAM, str(rank), coordinator, path],
            folder,
            count=processes,
            devices=devices,
            timeout=900,
        )
        return json.loads(path.with_suffix(".out").read_text())

    return call


@pytest.fixture(scope="module")
def two(led):
    """What two processes did, which are started once."""
    return led(2, 1, questions=FEW, pairs=PAIRS, slow=1, pool=POOL)


def served_as(found, wanted, preempts=True):
    """Everybody got these tokens, but for those who left, were stopped or came too late."""
    many = len(wanted)
    assert found["plain"] == [wanted, ["length"] * many]
    tokens, how = found["mixed"]
    left = {1: "stop", 3: "Cancelled", 2 * many: "DeadlineExceeded"}
    assert how == [left.get(place, "length") for place in range(2 * many + 1)]
    for place, answer in enumerate(tokens[:-1]):
        full = wanted[place % many]
        assert answer == (full[: len(answer)] if place in left else full)
    assert 2 <= len(tokens[1]) < TOKENS and 2 <= len(tokens[3]) < TOKENS and not tokens[-1]
    assert found["preempted"] >= preempts


def tokens_of(wide_model_dir, questions, **given):
    """Of each question alone, on one device."""
    model = load_model(wide_model_dir, cache_tokens=1024)
    given = {"method": "turborag", "documents": DOCUMENTS, "max_new_tokens": TOKENS} | given
    given["neighbours"] = "prompt"
    return [one.token_ids for one in generate(questions, model=model, **given)]


def test_two_processes_answer_as_one_device(two, wide_model_dir):
    """With cancellations, early leavers, a deadline and preemption, which the leader orders."""
    served_as(two, tokens_of(wide_model_dir, FEW))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "method"),
    [(4, "turborag"), (2, "turborag"), (2, "fusionrag"), (2, "full_attention")],
)
def test_processes_answer_as_one_device(led, wide_model_dir, processes, method):
    found = led(processes, 1, method, questions=TWENTY)
    served_as(found, tokens_of(wide_model_dir, TWENTY, method=method))


def read_beside_others(found, wide_model_dir):
    wanted = [
        tokens_of(wide_model_dir, [question], documents=[document])[0]
        for question, document in PAIRS
    ]
    assert found["first"] == wanted
    assert found["how"] == ["length", "length", "DeadlineExceeded", "Cancelled"]
    assert found["meanwhile"] == [wanted[0], [], [], []]
    assert found["tokens"] == [*wanted[:2], [], []]


def test_chunks_are_read_while_others_are_served(two, wide_model_dir):
    """A process's store does not answer until somebody else has been served, and two have left."""
    read_beside_others(two, wide_model_dir)


@pytest.mark.slow
def test_chunks_are_read_while_the_leader_waits(led, wide_model_dir):
    read_beside_others(led(2, 1, pairs=PAIRS, slow=0, pool=1024), wide_model_dir)


@pytest.mark.slow
def test_processes_encode_what_is_missing_as_one_device(led, wide_model_dir, tmp_path):
    """Of documents without KV, under one lease of all of them."""
    model = load_model(wide_model_dir, cache_tokens=1024)
    cut = {"chunk_tokens": 64, "overlap": 0, "encoders": ["isolated"]}
    documents = [Document(id=str(at), text=text) for at, text in enumerate(DOCUMENTS)]
    for name, encode in (("kb", "on demand"), ("other", "now")):
        with KnowledgeBase.open(tmp_path / name, model, **cut) as kb:
            kb.add(documents, encode=encode)
            asked = {"method": "turborag", "max_new_tokens": TOKENS}
            wanted = generate(FEW, kb=kb, **asked) if encode == "now" else []
    found = led(2, 1, questions=FEW, kb=str(tmp_path / "kb"), pool=512)
    served_as(found, [it.token_ids for it in wanted], preempts=False)
    with KnowledgeBase.open(tmp_path / "kb") as kb:
        assert any(kb.store.keys())
        assert not any(it.is_file() for it in (kb.path / "leases").rglob("*"))


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["native", "int8"])
@pytest.mark.parametrize("method", ["turborag", "fusionrag", "cacheblend", "epic"])
def test_processes_read_a_knowledge_base_as_one_device(
    led, wide_model_dir, tmp_path, method, stored
):
    model = load_model(wide_model_dir, cache_tokens=1024)
    encoders = ["isolated", "after_prefix", "neighbours"]
    cut = {"chunk_tokens": 64, "overlap": 0, "encoders": encoders, "stored": stored}
    with KnowledgeBase.open(tmp_path / "kb", model, **cut) as kb:
        kb.add([Document(id=str(at), text=text) for at, text in enumerate(DOCUMENTS)])
        asked = {"method": method, "max_new_tokens": TOKENS}
        wanted = [it.token_ids for it in generate(TWENTY, kb=kb, **asked)]
    found = led(2, 1, method, questions=TWENTY, kb=str(tmp_path / "kb"), pool=512)
    served_as(found, wanted, preempts=False)
