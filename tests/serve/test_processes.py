"""One model on a mesh that spans several processes answers as it does in one."""

import json
import sys
from pathlib import Path

import pytest

from jaxrag import KnowledgeBase
from jaxrag.cli import main
from jaxrag.models.model import load_model

JAXRAG = [sys.executable, "-c", "from jaxrag.cli import main; raise SystemExit(main())"]
TEXTS = [
    "Salt is worked at the wells by hands that ask for wool.",
    "The river is crossed on a raft, and the raft is pulled by a rope.",
    "Wool is sheared when the snow is gone and sold for salt.",
    "Tea comes over the pass on mules, two bags a mule.",
]
DOCUMENTS = ["The bridge was built of stone.", "Nobody crosses the bridge at night."]
QUESTIONS = [
    "Who asks for salt?",
    "What is the raft?",
    "What is rope?",
    "Who sells tea?",
    "What is snow?",
    "Where is the pass?",
]

INGEST = Path(__file__).parents[2] / "scripts" / "ingest.py"


@pytest.fixture
def kb(wide_model_dir, tmp_path):
    model = load_model(wide_model_dir, cache_tokens=4096)
    with KnowledgeBase.open(tmp_path / "kb", model=model, chunk_tokens=64) as kb:
        kb.add(TEXTS)
    return kb.path


@pytest.mark.slow
def test_the_command_goes_on_with_a_file_over_two_processes(kb, run_processes, tmp_path, capsys):
    """The first writes what is not answered yet; the file is that of one process."""
    lines = [{"id": f"q{i}", "question": text} for i, text in enumerate(QUESTIONS)]
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


@pytest.mark.slow
def test_ranks_of_jax_distributed_fill_one_knowledge_base(wide_model_dir, run_processes, tmp_path):
    """12 documents of 6 texts: each text is kept once, whoever encoded it."""
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text(f"The salt well number {number}.")
    lines = [
        json.dumps({"text": f"The salt well number {n}.", "id": f"line {n}"}) for n in range(6)
    ]
    (folder / "lines.jsonl").write_text("\n".join(lines))
    given = [folder, "--kb", tmp_path / "kb", "--model", wide_model_dir, "--template", "plain"]

    def command(rank, coordinator):
        joined = ["--distributed", "--coordinator", coordinator, "--processes", 2]
        own = ["--process-id", rank, "--chunk-tokens", 64, "--json"]
        return [sys.executable, *map(str, [INGEST, *given, *joined, *own])]

    printed = run_processes(command, tmp_path)
    reports = [json.loads(one.splitlines()[-1]) for one in printed]
    assert sum(report["documents"] for report in reports) == 12
    with KnowledgeBase.open(tmp_path / "kb") as kb:
        assert len(kb.documents()) == 12
        keys = {key for d in kb.documents() for key in kb._catalog.keys(d.id)["isolated"]}
        assert len(keys) == 6 and None not in kb.store.head(sorted(keys))


@pytest.mark.slow
def test_an_evaluation_over_two_processes_is_that_of_one(kb, run_processes, tmp_path, capsys):
    """Its given answers are looked at behind prefills that all processes end alike."""
    questions = tmp_path / "questions.jsonl"
    lines = [{"question": text, "answers": ["salt"]} for text in QUESTIONS[:3]]
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = ["eval", "own", "--kb", str(kb), "--questions", str(questions), "--k", "2", "--json"]
    own += ["--methods", "turborag,fusionrag", "--max-new-tokens", "6"]
    assert main(own) == 0
    alone = json.loads(capsys.readouterr().out)

    def command(rank, coordinator):
        joined = ["--distributed", "--coordinator", coordinator, "--processes", "2"]
        return [*JAXRAG, *own, *joined, "--process-id", str(rank)]

    first, _ = run_processes(command, tmp_path)
    both = json.loads(first[first.index("{") :])
    for name in ("scores", "same_answer", "same_tokens", "tokens"):
        assert [it[name] for it in both["methods"]] == [it[name] for it in alone["methods"]], name
