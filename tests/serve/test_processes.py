"""One model on a mesh that spans several processes answers as it does in one."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from jaxrag import KnowledgeBase, generate
from jaxrag.cli import main
from jaxrag.models.digest import params_digest
from jaxrag.models.model import load_model

PROGRAM = Path(__file__).with_name("one_model.py")
JAXRAG = [sys.executable, "-c", "from jaxrag.cli import main; raise SystemExit(main())"]
METHODS = ["turborag", "fusionrag"]
ENCODERS = ["isolated", "after_prefix", "neighbours"]
TEXTS = [
    "Salt is worked at the wells by hands that ask for wool.",
    "The river is crossed on a raft, and the raft is pulled by a rope.",
    "Wool is sheared when the snow is gone and sold for salt.",
    "Tea comes over the pass on mules, two bags a mule.",
]
DOCUMENTS = ["The bridge was built of stone.", "Nobody crosses the bridge at night."]
THINGS = [
    "salt",
    "wool",
    "tea",
    "the river",
    "the raft",
    "the pass",
    "snow",
    "rope",
    "a mule",
    "it",
]
QUESTIONS = [f"{word} {thing}?" for word in ("Who asks for", "What is") for thing in THINGS]
GIVEN = {"max_new_tokens": 6, "batch_size": 8}


@pytest.fixture(scope="module")
def alone(wide_model_dir, tmp_path_factory):
    """The model in this process, a knowledge base, and the answers to all that is asked."""
    model = load_model(wide_model_dir, cache_tokens=4096)
    path = tmp_path_factory.mktemp("alone") / "kb"
    answers = {}
    with KnowledgeBase.open(path, model=model, chunk_tokens=64, encoders=ENCODERS) as kb:
        kb.add(TEXTS)
        for method in METHODS:
            given = {**GIVEN, "method": method}
            answers[method] = {
                "retrieved": generate(QUESTIONS, kb=kb, k=2, **given),
                "stored": generate(QUESTIONS[:8], model=model, documents=DOCUMENTS, **given),
            }
            answers[method]["in memory"] = answers[method]["stored"]
    return model, path, answers


@pytest.mark.slow
@pytest.mark.slow  # law 11 holds in one process in every run (tests/test_laws.py)
@pytest.mark.parametrize(
    ("mesh", "order", "shares"),
    [
        ((1, 1, 4), [0, 1, 2, 3], [[0, 2, True], [1, 2, True]]),
        ((1, 2, 2), [0, 2, 1, 3], [[0, 2, True], [1, 2, True]]),
    ],
    ids=["tensor", "fsdp and tensor"],
)
def test_two_processes_answer_as_one(
    alone, wide_model_dir, run_processes, tmp_path, mesh, order, shares
):
    model, kb, answers = alone
    shutil.copytree(kb, tmp_path / "kb")
    work = {
        "processes": 2,
        "mesh": mesh,
        "order": order,
        "model": str(wide_model_dir),
        "kb": str(tmp_path / "kb"),
        "methods": METHODS,
        "questions": QUESTIONS,
        "documents": DOCUMENTS,
        "tokens": GIVEN["max_new_tokens"],
        "batch": GIVEN["batch_size"],
    }
    path = tmp_path / "work.json"
    path.write_text(json.dumps(work))
    run_processes(
        lambda rank, coordinator: [sys.executable, PROGRAM, str(rank), coordinator, path],
        tmp_path,
    )
    found = [json.loads(path.with_suffix(f".{rank}.json").read_text()) for rank in range(2)]
    assert [one.pop("share") for one in found] == shares
    assert found[0] == found[1]
    assert found[0]["digest"] == params_digest(model.params)
    for method in METHODS:
        for name, results in answers[method].items():
            got = found[0][method][name]
            assert [ids for ids, _, _ in got] == [one.token_ids for one in results], (method, name)
            # Nothing is computed that the store holds; what it lacked is stored, and says so.
            missed = [notes for _, _, notes in got if notes]
            assert all("and stored" in note for notes in missed for note in notes)
            assert (name == "retrieved") <= (not missed)
    messages = []
    for turn, (ids, hows) in enumerate(found[0]["talk"]):
        messages.append({"role": "user", "content": QUESTIONS[turn]})
        one = generate(messages=messages, model=model, documents=DOCUMENTS, max_new_tokens=20)
        assert ids == one.token_ids and hows == ["prefix hit"] * turn
        messages.append({"role": "assistant", "content": ids})
    with KnowledgeBase.open(tmp_path / "kb", model=model) as after:
        assert {record.ways for record in after.store.records()} == {1, 2}
        again = generate(QUESTIONS[:8], kb=after, documents=DOCUMENTS, **GIVEN)
        assert not any(one.notes for one in again)  # what two processes stored, one reads
        assert [one.token_ids for one in again] == [
            one.token_ids for one in answers["turborag"]["stored"]
        ]


@pytest.mark.slow
def test_the_command_goes_on_with_a_file_over_two_processes(alone, run_processes, tmp_path, capsys):
    """The first writes what is not answered yet; the file is that of one process."""
    _, kb, _ = alone
    lines = [{"id": f"q{i}", "question": text} for i, text in enumerate(QUESTIONS[:6])]
    lines[4]["documents"] = DOCUMENTS
    lines.append({"id": "bad", "question": 3})
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shared = ["--questions", str(questions), "--kb", str(kb), "--k", "2", "--max-new-tokens", "6"]
    shared += ["--batch-size", "4", "--json"]
    assert main(["generate", *shared, "--out", str(tmp_path / "one.jsonl")]) == 3
    capsys.readouterr()
    wanted = (tmp_path / "one.jsonl").read_text().splitlines()
    settings = (tmp_path / "one.jsonl.settings.json").read_text()
    (tmp_path / "two.jsonl").write_text("\n".join([*wanted[:2], wanted[2][:9]]))  # it was killed
    (tmp_path / "two.jsonl.settings.json").write_text(settings)

    def command(rank, coordinator):
        joined = ["--distributed", "--coordinator", coordinator, "--processes", "2"]
        own = ["--process-id", str(rank), "--out", str(tmp_path / "two.jsonl")]
        return [*JAXRAG, "generate", *shared, *joined, *own]

    printed = run_processes(command, tmp_path, code=3)
    assert json.loads(printed[0].splitlines()[-1])["earlier"] == 2
    assert all("Gloo" in line or "peer ranks" in line for line in printed[1].splitlines())

    def answers(name):
        read = map(json.loads, (tmp_path / name).read_text().splitlines())
        return {one["id"]: one.get("text", one.get("error")) for one in read}

    assert answers("two.jsonl") == answers("one.jsonl")
    assert len((tmp_path / "two.jsonl").read_text().splitlines()) == len(lines)
