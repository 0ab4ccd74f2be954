"""One's own questions: what is scored, against what, and what a bad file is told."""

import json

import pytest
from refusal import refused

from jaxrag.base.errors import ConfigError, RequestError
from jaxrag.cli import main
from jaxrag.cli.output import titled
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.measure.evals import own as own_questions
from jaxrag.measure.evals.datasets.report import notes, tables
from jaxrag.measure.evals.gate import gate
from jaxrag.measure.evals.metrics import exact_match, token_f1
from jaxrag.measure.evals.options import GateOptions, OwnOptions, Target
from jaxrag.measure.evals.own import evaluate, probes_of
from jaxrag.reuse.methods import METHODS
from jaxrag.serve.generate import generate
from jaxrag.serve.question_files import QuestionFile

DOCUMENTS = [
    {"id": "tea", "text": "Tea grows on the hills of the village and is sold in blue boxes."},
    {"id": "salt", "text": "Salt is carried to the village by mules every second week."},
    {"id": "oak", "text": "The oven of the village is fired with oak from the king's forest."},
]
QUESTIONS = [
    ("Where in the village does tea grow?", ["on the hills"], ["tea"]),
    ("Who carries the salt to the village?", ["mules"], ["salt", "oak"]),
    ("Which wood fires the oven of the village?", ["oak"], []),
]
ASK = {"k": 1, "max_new_tokens": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, text_model):
    path = tmp_path_factory.mktemp("own") / "kb"
    with KnowledgeBase.open(path, text_model, template="plain", encoders=["after_prefix"]) as kb:
        kb.add(DOCUMENTS)
    return path


@pytest.fixture(scope="module")
def kb(folder, text_model):
    with KnowledgeBase.open(folder, text_model) as kb:
        yield kb


@pytest.fixture(scope="module")
def rightly(kb):
    """What full attention answers to the first question."""
    return generate(QUESTIONS[0][0], kb=kb, method="full_attention", **ASK)


@pytest.fixture(scope="module")
def file(tmp_path_factory, rightly):
    """Questions of which the first has the model's own answer for the right one."""
    path = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    golds = [[rightly.text, "on the hills"], *(gold for _, gold, _ in QUESTIONS[1:])]
    path.write_text("".join(
        json.dumps({"question": question, "answers": answers} | ({"sources": ids} if ids else {}))
        + "\n" for (question, _, ids), answers in zip(QUESTIONS, golds, strict=True)
    ))  # fmt: skip
    return path


@pytest.fixture(scope="module")
def found(kb, file):
    return evaluate(kb, QuestionFile.open(file), OwnOptions(("full_reuse",), **ASK))


def answers_of(found, name):
    return [line["methods"][name] for _, line in found.items]


def test_answers_are_those_of_generate_and_scored_by_the_same_rules(kb, found):
    records = iter(found.records())
    for name in ("full_attention", "full_reuse"):
        for i, (question, _, _) in enumerate(QUESTIONS):
            asked, golds = generate(question, kb=kb, method=name, **ASK), found.items[i][0].answers
            record = next(records)
            assert record["token_ids"] == asked.token_ids
            assert record["exact_match"] == exact_match(asked.text, golds)
            assert record["f1"] == token_f1(asked.text, golds)
    full, reuse = found.to_dict()["methods"]
    right = full["scores"]["exact_match"]["all"]
    assert right["value"] == pytest.approx(1 / 3) and right["n"] == 3
    assert full["tokens"]["reused"] == reuse["encoded"] == 0 < reuse["tokens"]["reused"]
    for metric in ("exact_match", "f1", "holds"):
        own, first = (row["scores"][metric]["all"]["value"] for row in (reuse, full))
        assert reuse["minus_first"][metric]["all"]["value"] == pytest.approx(own - first)


def test_one_chunk_behind_the_prefix_is_read_as_full_attention_reads_it(found):
    """Its KV is exact, so that the two methods have to agree in every token."""
    for row in found.to_dict()["methods"]:
        assert row["same_answer"]["value"] == row["same_tokens"]["value"] == 1
        assert row["ttft"]["value"] > 0 and row["ttft"]["low"] is None  # of three questions


def test_recall_is_the_share_of_the_sources_that_were_retrieved(found):
    result = found.to_dict()
    assert result["with_sources"] == 2  # tea is found; of salt and oak one, as k is 1
    assert result["recall"]["value"] == pytest.approx((1 + 0.5) / 2)


def test_what_the_store_lacked_is_told_and_is_in_no_time(kb, file):
    """The chunks are encoded once; the time is that of the answer that finds them."""
    first, again = (
        evaluate(kb, QuestionFile.open(file), OwnOptions(("turborag",), **ASK)) for _ in range(2)
    )
    assert any(it["encoded"] for it in answers_of(first, "turborag"))
    assert any("turborag: the knowledge base lacked" in it for it in notes(first.to_dict()))
    for one in answers_of(again, "turborag"):
        assert one["encoded"] == one["counts"]["encoded"] == 0 < one["counts"]["reused"]
    assert not any("lacked" in it for it in notes(again.to_dict()))


def test_a_gate_on_the_same_questions_is_told(tmp_path, text_model, file):
    """The same file feeds both; what was tuned on it looks better than it is."""
    questions = QuestionFile.open(file)
    options = {"template": "plain", "encoders": ["after_prefix"]}
    with KnowledgeBase.open(tmp_path, text_model, **options) as kb:
        kb.add(DOCUMENTS)
        target = Target(0.0, 99.0)
        gate(kb, questions, GateOptions(METHODS["cacheblend"], ratios=(0.3,), target=target, k=1))
        found = evaluate(kb, questions, OwnOptions(("cacheblend",), **ASK))
    assert found.to_dict()["methods"][1]["ratio"] == 0.3
    assert any("chosen on these very questions" in note for note in found.notes)


def test_tables_have_80_columns_and_say_what_misleads(found):
    result = found.to_dict()
    for table in tables(result):
        assert {len(row) for row in table.rows} == {len(table.rows[0])}
    lines = "\n".join(titled(tables(result))).splitlines()
    assert max(map(len, lines)) <= 80
    told = "\n".join(notes(result))
    assert "3 questions are few" in told
    assert "cut off at 4 tokens (3 of full_attention, 3 of full_reuse)" in told


def test_command(folder, file, tmp_path, model_dir, capsys):
    asked = ["eval", "own", "--kb", str(folder), "--model", str(model_dir), "--k", "1"]
    asked += ["--max-new-tokens", "4", "--methods", "full_reuse", "--questions"]
    out = tmp_path / "records.jsonl"
    assert main([*asked, str(file), "--cache-tokens", "8192", "--out", str(out)]) == 0
    assert list(tmp_path.iterdir()) == [out]  # what was kept to go on from is not needed any more
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "recall@1 of sources, in %: 75.0 [" in " ".join(shown.split())
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(it["id"], it["method"]) for it in records] == [
        (i, name) for name in ("full_attention", "full_reuse") for i in (1, 2, 3)
    ]
    assert records[1]["recall"] == 0.5 and records[2]["recall"] is None
    # The same as CSV.
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    cells = [(r["question"], "|".join(r["answers"]), "|".join(r.get("sources", []))) for r in rows]
    table = tmp_path / "questions.csv"
    quoted = (",".join(f'"{it.replace(chr(34), 2 * chr(34))}"' for it in row) for row in cells)
    table.write_text("\n".join(("question,answers,sources", *quoted)))
    assert main([*asked, str(table), "--cache-tokens", "8192", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["recall"]["value"] == 0.75
    assert [it["same_answer"]["value"] for it in result["methods"]] == [1, 1]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", '{"question": "Tea?", "answers": "x"}\n{"question": "Tea?"}', [":2:", "None"]),
        ("a.jsonl", '{"question": "Tea?", "answers": [" "]}', [":1:", '"answers": ["larch"]']),
        ("a.jsonl", '{"question": "Tea?", "answers": 3}', [":1:", "is 3"]),
        ("a.jsonl", '{"id": "t", "answers": "x"}', [":1:", '"question" is None']),
        ("a.jsonl", "\n\n{", [":3:", "not a line of JSON"]),
        (
            "a.jsonl",
            '{"question": "Tea?", "answers": "x", "sources": ["tee"]}',
            [":1:", "'tee' is no document", "jaxrag kb list"],
        ),
        ("a.jsonl", '{"question": "Tea?", "answers": "x", "sources": 5}', [":1:", "list of ids"]),
        (
            "a.jsonl",
            '{"question": "Tea?", "answers": "x", "documents": ["tea"]}',
            [":1:", "texts to answer from", '"sources"'],
        ),
        ("a.csv", "text,answers\nTea?,x", [":1:", "no column 'question' among text, answers"]),
        ("a.csv", "question,answers\nTea, salt?,x", [":2:", "3 cells under 2 columns"]),
        ("a.csv", 'question,answers\n"Tea?,x', [":2:", "not CSV"]),
        ("a.csv", "question,answers\nTea?,", [":2:", "None"]),
        ("a.jsonl", "", ["holds no questions"]),
    ],
)
def test_a_bad_line_is_told_before_anything_is_computed(kb, tmp_path, name, text, words):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(RequestError) as refusal:
        probes_of(QuestionFile.open(path), kb)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_what_is_kept_is_not_asked_again(kb, file, tmp_path, monkeypatch):
    """Of the same questions, options and documents; a line that is cut short counts for nothing."""
    questions, kept = QuestionFile.open(file), tmp_path / "kept"
    asked, answers_to = [], own_questions.answers_to

    def counting(answerer, item):
        asked.append(item.id)
        return answers_to(answerer, item)

    monkeypatch.setattr(own_questions, "answers_to", counting)

    def run(method="full_reuse"):
        return evaluate(kb, questions, OwnOptions((method,), **ASK), kept=kept)

    first = run()
    assert asked == ["1", "2", "3"]
    again = run()
    assert len(asked) == 3
    assert again.to_dict() == first.to_dict() and again.records() == first.records()
    kept.write_text(kept.read_text()[:-10])
    assert [it for it, _ in run().items] == [it for it, _ in first.items]
    assert asked == ["1", "2", "3", "3"]
    with refused(ConfigError, "options"):
        run("turborag")
    kb.set_gate("turborag", {"ratio": 0.5, "probes": "none"})
    with refused(ConfigError, "changes"):  # the knowledge base is another
        run()
    assert len(asked) == 4
