"""Rows over one's own documents: what is kept, where it goes, and that a run goes on."""

import json
import types

import pytest
from refusal import refused

from jaxrag.base.errors import ConfigError, RequestError
from jaxrag.cli import main
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.measure.evals import rows
from jaxrag.measure.evals.options import RowsOptions
from jaxrag.measure.evals.own import probes_of
from jaxrag.measure.evals.rows import (
    BOTH_SIDES,
    DOUBLE,
    NO_ANSWER,
    NO_QUESTION,
    NO_SOURCE,
    NOT_IN_PASSAGE,
    Made,
    RowFiles,
    made_of,
    make_rows,
)
from jaxrag.models.model import load_model
from jaxrag.serve.generate import generate
from jaxrag.serve.question_files import QuestionFile
from jaxrag.train.samples import SampleWriter

TREES = "alder beech cedar elm fir hazel juniper larch maple oak pine rowan"
TREES = TREES.split()
DOCUMENTS = [
    {"id": f"{tree}.txt", "title": tree, "text": f"The {tree} of the park stands in row {n} of it."}
    for n, tree in enumerate(TREES)
]
HALF = RowsOptions(held_out_share=0.5, k=3)


@pytest.fixture(scope="module")
def kb(tmp_path_factory, text_model):
    with KnowledgeBase.open(tmp_path_factory.mktemp("rows") / "kb", text_model) as kb:
        kb.add(DOCUMENTS)
        yield kb


@pytest.fixture(scope="module")
def chat_kb(tmp_path_factory, chat_model_dir):
    model = load_model(chat_model_dir, cache_tokens=8192)
    with KnowledgeBase.open(tmp_path_factory.mktemp("rows") / "kb", model) as kb:
        kb.add(DOCUMENTS)
        yield kb


@pytest.fixture
def asked(tmp_path):
    """A question on every document, with its source."""
    lines = [
        {"question": f"Where does the {tree} stand?", "answers": [f"row {n}"],
         "sources": [f"{tree}.txt"]}
        for n, tree in enumerate(TREES)
    ]  # fmt: skip
    return questions(tmp_path / "asked.jsonl", lines)


def questions(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return QuestionFile.open(path)


def made(kb, folder, options, given=None, resume=False):
    """The report, and what both files hold."""
    paths = folder / "rows.jsonl", folder / "held.jsonl"
    with RowFiles.open(*paths, options, resume=resume) as files:
        report = make_rows(kb, files, options, given)
    return report, *map(lines_of, paths)


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_no_document_is_on_both_sides_and_every_row_holds_its_passage(kb, asked, tmp_path):
    report, found, held = made(kb, tmp_path, HALF, asked)
    assert (report.rows, report.held_out) == (len(found), len(held))
    assert len(found) + len(held) == len(TREES) and found and held
    away = {line["sources"][0].removesuffix(".txt") for line in held}
    for row in found:
        titles = [chunk["title"] for chunk in row["chunks"]]
        own = row["sources"][0].removesuffix(".txt")
        assert len(titles) == len(set(titles)) == 3 and own in titles
        assert not away & set(titles)
        assert any(row["answers"][0] in chunk["text"] for chunk in row["chunks"])
    places = [[c["title"] for c in row["chunks"]].index(row["sources"][0][:-4]) for row in found]
    assert len(set(places)) > 1  # shuffled: the answer's place says nothing
    probes = probes_of(QuestionFile.open(tmp_path / "held.jsonl"), kb)
    assert len(probes) == len(held)


def test_rows_are_prompts_as_the_knowledge_base_makes_them(kb, asked, tmp_path):
    """What a run trains on are the tokens that a question later reads."""
    _, found, _ = made(kb, tmp_path, HALF, asked)
    tokenizer = kb.model.tokenizer
    writer = SampleWriter(tokenizer, kb.template, 0, "", "none")
    for row in found:
        hits = {hit.title: hit for hit in kb.search(row["question"], len(TREES))}
        for ids, chunk in zip(writer.write(row).chunks, row["chunks"], strict=True):
            hit = hits[chunk["title"]]
            assert ids.tolist() == kb.template.chunk_ids(tokenizer, hit.ids, hit.title).tolist()


def test_the_seed_decides_and_a_cut_run_goes_on_to_the_same_files(kb, asked, tmp_path):
    folders = [tmp_path / name for name in ("whole", "again", "cut", "other")]
    for folder in folders:
        folder.mkdir()
    _, *whole = made(kb, folders[0], HALF, asked)
    _, *again = made(kb, folders[1], HALF, asked)
    assert whole == again
    few = RowsOptions(held_out_share=0.5, k=3, passages=5)
    made(kb, folders[2], few, asked)
    out = folders[2] / "rows.jsonl"
    with out.open("a") as file:
        file.write('{"id": 6, "quest')  # killed while it wrote
    with refused(RequestError, "--resume"):
        made(kb, folders[2], HALF, asked)
    _, *rest = made(kb, folders[2], HALF, asked, resume=True)
    assert rest == whole
    _, *other = made(kb, folders[3], RowsOptions(held_out_share=0.5, k=3, seed=1), asked)
    assert other != whole


def test_questions_that_cannot_be_used_are_counted(kb, tmp_path):
    maker = rows._Maker(kb, None, HALF)
    side = {tree: maker._is_held_out(f"{tree}.txt") for tree in TREES}
    both = next([a, b] for a in TREES for b in TREES if side[a] != side[b])
    given = questions(tmp_path / "asked.jsonl", [
        {"question": "Where does the elm stand?", "answers": ["row 3"]},  # found by its words
        {"question": "where does an ELM stand", "answers": ["row 3"], "sources": ["elm.txt"]},
        {"question": "Who planted the elm?", "answers": ["a gardener"]},
        {"question": "Which stand?", "answers": ["x"], "sources": [f"{it}.txt" for it in both]},
    ])  # fmt: skip
    report, found, held = made(kb, tmp_path, HALF, given)
    assert report.dropped == {
        NO_QUESTION: 0, NOT_IN_PASSAGE: 0, DOUBLE: 1, NO_SOURCE: 1, BOTH_SIDES: 1, NO_ANSWER: 0
    }  # fmt: skip
    assert [line["sources"] for line in (*found, *held)] == [["elm.txt"]]


def test_answers_of_the_model_are_full_attentions_over_the_row(kb, asked, tmp_path):
    options = RowsOptions(held_out_share=0.5, k=3, own_answers=True, max_new_tokens=6)
    report, found, _ = made(kb, tmp_path, options, asked)
    assert report.rows + report.dropped[NO_ANSWER] + report.held_out == len(TREES)
    (tmp_path / "given").mkdir()
    _, given, _ = made(kb, tmp_path / "given", HALF, asked)
    said = {}
    for row in given:
        hits = {hit.title: hit for hit in kb.search(row["question"], len(TREES))}
        ids = [hits[chunk["title"]] for chunk in row["chunks"]]
        texts = [hit.text for hit in ids]
        said[row["id"]] = generate(
            row["question"], documents=texts, model=kb.model, method="full_attention",
            template=kb.template, max_new_tokens=6,
        )  # fmt: skip
    kept = {i for i, it in said.items() if it.finish_reason == "stop" and it.text.strip()}
    assert {row["id"] for row in found} == kept
    assert all(row["answers"] == [said[row["id"]].text.strip()] for row in found)


HIT = types.SimpleNamespace(text="The oven is fired with oak from the king's forest.")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Question: What fires the oven?\nAnswer: oak", ("What fires the oven?", "oak")),
        ("**Question:** Which wood?\n\n**Answer:** Oak.", ("Which wood?", "Oak.")),
        ("Sure!\nQuestion: Whose is it?\nAnswer: the king's", ("Whose is it?", "the king's")),
        ("Question: What fires the oven?", NO_QUESTION),
        ("oak", NO_QUESTION),
        ("Question: What?\nAnswer: " + "oak " * 13, NO_QUESTION),
        ("Question: What fires the oven?\nAnswer: birch", NOT_IN_PASSAGE),
        ("Question: Is it oak?\nAnswer: oak", NOT_IN_PASSAGE),
    ],
)  # fmt: skip
def test_what_the_model_writes_is_kept_only_if_the_passage_holds_it(text, expected):
    found = made_of(4, text, HIT)
    if isinstance(found, Made):
        found = found.question, *found.answers
    assert found == expected


def test_the_model_is_asked_in_its_chat_format_about_every_passage_once(
    chat_kb, tmp_path, monkeypatch
):
    """A random model writes nothing of use: what it is asked is looked at, and answered here."""
    prompts = []

    def answered(ready, batch_size):
        tokenizer = chat_kb.model.tokenizer
        results = []
        for one in ready:
            prompt = one.prompt
            parts = (prompt.prefix, *prompt.chunks, prompt.final)
            prompts.append("".join(tokenizer.decode(p, skip_special=False) for p in parts))
            tree = next(tree for tree in TREES if f"The {tree} of" in prompts[-1])
            text = f"Question: Where is the {tree}?\nAnswer: row {TREES.index(tree)}"
            results.append(types.SimpleNamespace(text=text))
        return results

    monkeypatch.setattr(rows, "answered", answered)
    report, found, held = made(chat_kb, tmp_path, HALF)
    assert len(prompts) == len(set(prompts)) == len(TREES)
    for prompt in prompts:
        assert prompt.endswith("<|im_start|>assistant\n") and "<|im_start|>user\nHere" in prompt
    assert report.rows + report.held_out == len(TREES)
    assert sorted(line["id"] for line in (*found, *held)) == list(range(1, len(TREES) + 1))


def test_a_model_that_writes_nothing_of_use_is_told_in_one_line(chat_kb, tmp_path):
    options = RowsOptions(passages=3, max_new_tokens=4)
    with refused(RequestError, NO_QUESTION):
        made(chat_kb, tmp_path, options)


def test_a_model_without_a_chat_format_takes_questions_only(kb, tmp_path):
    with refused(RequestError, "--questions FILE"):
        made(kb, tmp_path, HALF)


def test_files_that_are_none_of_ours(tmp_path):
    path = tmp_path / "rows.jsonl"
    with refused(RequestError), RowFiles.open(path, path, HALF):
        pass
    path.write_text('{"text": "a document"}\n')
    other = tmp_path / "held.jsonl"
    with refused(ConfigError, "settings.json"), RowFiles.open(path, other, HALF, resume=True):
        pass


def test_command(kb, asked, tmp_path, model_dir, capsys):
    out, held = tmp_path / "rows.jsonl", tmp_path / "held.jsonl"
    command = ["kb", "questions", str(kb.path), "--model", str(model_dir), "--k", "3"]
    command += ["--questions", str(asked.path), "--out", str(out), "--held-out", str(held)]
    command += ["--held-out-share", "0.5", "--cache-tokens", "8192"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    rows, kept = len(lines_of(out)), len(lines_of(held))
    assert shown == (
        f"{out}: {rows} rows of {rows} documents\n{held}: {kept} questions on other documents\n"
    )
    assert main([*command, "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 0
