"""Batch runs: a file of questions in, a file of answers out, whatever happens in between."""

import dataclasses
import fcntl
import json

import pytest
from refusal import refused

from jaxrag import KnowledgeBase, generate
from jaxrag.base.errors import ConfigError, RequestError, StoreError, TokenizerError
from jaxrag.cli import main
from jaxrag.engine.engine import engine_of
from jaxrag.engine.sampling import SamplingParams
from jaxrag.library.documents import Document, Shard
from jaxrag.models.text.prompts import PromptTemplate
from jaxrag.serve import batch
from jaxrag.serve.answer_files import AnswerFile, settings_path
from jaxrag.serve.ask import Ask
from jaxrag.serve.batch import answer_file, question_seed
from jaxrag.serve.question_files import BadQuestion, FileQuestion, QuestionFile
from jaxrag.serve.questions import resolve

WARM = SamplingParams(temperature=1.0, seed=5)
LINES = [
    {"id": "salt", "question": "Who works the salt wells?", "answers": ["hands"]},
    {"question": "What crosses the river?"},
    {"id": 7, "question": "And the wool?", "documents": ["Wool is sheared.", "Wool is sold."]},
    {"id": "tea", "question": "What was traded for salt?"},
]
BAD = [
    (b"{", "line 1", "not a line of JSON"),
    (b"\xff", "line 1", "not a line of JSON in UTF-8"),
    (b"[1]", "line 1", "holds a list"),
    (b'{"id": "x"}', "x", '"question" is None'),
    (b'{"question": 3}', 1, '"question" is 3'),
    (b'{"id": 1.5, "question": "q"}', "line 1", "id 1.5: expected a text or an integer"),
    (b'{"id": true, "question": "q"}', "line 1", "id True"),
    (b'{"id": "", "question": "q"}', "line 1", "id ''"),
    (b'{"id": "\\ud800", "question": "q"}', "line 1", "expected a text or an integer"),
    (b'{"question": "q", "documents": "text"}', 1, "\"documents\" is 'text'"),
    (b'{"question": "q", "documents": [3]}', 1, "expected a list of texts"),
]


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def plain(answer):
    """An answer without what differs from run to run."""
    varies = ("timings", "notes", "reuse")
    return {name: value for name, value in answer.items() if name not in varies}


@pytest.fixture(scope="module")
def kb_dir(tmp_path_factory, text_model):
    path = tmp_path_factory.mktemp("batch") / "kb"
    with KnowledgeBase.open(path, text_model, template="plain", chunk_tokens=64) as kb:
        kb.add(
            [
                Document("salt", "The salt wells of Yanjing are worked by hand."),
                Document("bridge", "A bamboo bridge crosses the river at the wells."),
                Document("tea", "Tea bricks were traded for salt and for wool."),
            ]
        )
    return path


@pytest.fixture(scope="module")
def kb(kb_dir, text_model):
    with KnowledgeBase.open(kb_dir, text_model) as opened:
        yield opened


@pytest.fixture(scope="module")
def settings(kb):
    return resolve(Ask(method="turborag", k=2, max_new_tokens=6), kb=kb)


@pytest.fixture
def answer(settings, tmp_path):
    """``answer(lines)``: the report of a run over these lines; answers go to ``answer.out``."""

    def run(lines, *, settings=settings, sampling=WARM, shard=None, batch_size=4, out=None):
        questions = QuestionFile.open(write(tmp_path / "questions.jsonl", lines))
        return answer_file(
            questions,
            out or run.out,
            dataclasses.replace(settings, ask=dataclasses.replace(settings.ask, sampling=sampling)),
            shard=shard or Shard(),
            batch_size=batch_size,
        )

    run.out = tmp_path / "answers.jsonl"
    return run


def test_every_question_gets_the_answer_that_generate_gives(answer, kb):
    report = answer(LINES)
    assert report.complete
    assert (report.questions, report.answered, report.earlier) == (4, 4, 0)
    answers = {line.pop("id"): line for line in read(answer.out)}
    assert set(answers) == {"salt", 2, 7, "tea"}
    assert report.generated_tokens == sum(len(a["token_ids"]) for a in answers.values()) > 0
    assert report.reused_tokens == sum(a["counts"]["reused"] for a in answers.values()) > 0
    assert all(rate > 0 for rate in report.rates().values())
    for line, name in zip(LINES, ("salt", 2, 7, "tea"), strict=True):
        own = dataclasses.replace(WARM, seed=question_seed(WARM.seed, name))
        documents = line.get("documents")
        alone = generate(
            line["question"], kb=kb, documents=documents, k=2, max_new_tokens=6, sampling=own
        )
        assert list(answers[name]) == list(alone.to_dict())
        assert answers[name]["token_ids"] == alone.token_ids
        assert answers[name]["sources"] == alone.to_dict()["sources"]
    assert [s["text"] for s in answers[7]["sources"]] == LINES[2]["documents"]


def test_answers_do_not_depend_on_batch_shard_or_order(answer, tmp_path):
    answer(LINES)
    whole = {line["id"]: plain(line) for line in read(answer.out)}
    found = {}
    for index in (0, 1):
        out = tmp_path / f"{index}.jsonl"
        report = answer(LINES, shard=Shard(index, 2), batch_size=1, out=out)
        assert report.questions == 2
        found |= {line["id"]: plain(line) for line in read(out)}
    assert found.keys() == whole.keys()
    for name, one in found.items():
        assert one["token_ids"] == whole[name]["token_ids"]
        assert one["sources"] == whole[name]["sources"]


def test_seed_of_a_question_depends_on_its_id_and_the_runs_seed():
    seeds = {question_seed(seed, name) for seed in (0, 1) for name in ("a", "b", 1, 2)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert question_seed(0, "salt") == 726414979  # fixed for good: answers can be made again


def test_refused_questions_cost_only_themselves(answer):
    lines = [
        LINES[0],
        {"id": "empty", "question": "  "},
        {"id": "long", "question": "why " * 900},
        {"id": "bad", "question": 3},
        {"id": "blank", "question": "q", "documents": ["x", ""]},
        LINES[3],
    ]
    report = answer(lines)
    assert not report.complete
    assert (report.answered, len(report.refused)) == (2, 4)
    answers = {line["id"]: line for line in read(answer.out)}
    assert len(answers) == 6
    assert list(answers["empty"]) == ["id", "error"]
    assert "question is empty" in answers["empty"]["error"]
    assert "context is 1024" in answers["long"]["error"]
    assert "expected a text" in answers["bad"]["error"]
    assert "documents[1] is empty" in answers["blank"]["error"]
    assert answers["tea"]["finish_reason"] == "length"
    again = answer(lines)
    assert (again.answered, again.refused, again.earlier, again.earlier_refused) == (0, (), 6, 4)
    assert not again.complete


def test_a_killed_run_goes_on_and_answers_everything_once(answer, monkeypatch):
    answer(LINES)
    expected = {line["id"]: plain(line) for line in read(answer.out)}
    answer.out.unlink()
    settings_path(answer.out).unlink()
    serve = batch.serve

    def dying(*arguments):
        yield next(serve(*arguments))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(batch, "serve", dying)
        answer(LINES, batch_size=1)
    assert len(read(answer.out)) == 1  # what was answered is on disk
    with answer.out.open("a") as file:
        file.write('{"id": "tea", "text": "cut sh')
    report = answer(LINES, batch_size=2)
    assert (report.earlier, report.answered) == (1, 3)
    found = {line["id"]: plain(line) for line in read(answer.out)}
    assert len(read(answer.out)) == 4
    assert {n: a["token_ids"] for n, a in found.items()} == {
        n: a["token_ids"] for n, a in expected.items()
    }
    before = answer.out.read_bytes()
    assert answer(LINES).answered == 0
    assert answer.out.read_bytes() == before


def test_storage_that_fails_ends_the_run_and_keeps_what_is_answered(answer, monkeypatch):
    calls = []

    def failing(*arguments):
        calls.append(arguments)
        raise StoreError("disk on fire")
        yield

    monkeypatch.setattr(batch, "serve", failing)
    bad = {"id": "bad", "question": ""}
    with refused(StoreError):
        answer([bad, *LINES])
    assert [line["id"] for line in read(answer.out)] == ["bad"]
    assert len(calls) == 1


def test_other_settings_are_refused_by_name(answer, settings, tmp_path):
    answer(LINES)
    before = answer.out.read_bytes()
    replace = dataclasses.replace
    changes = {
        "k": {"settings": replace(settings, ask=replace(settings.ask, k=3))},
        "min_score": {"settings": replace(settings, ask=replace(settings.ask, min_score=0.5))},
        "max_new_tokens": {
            "settings": replace(settings, ask=replace(settings.ask, max_new_tokens=7))
        },
        "stop": {"settings": replace(settings, ask=replace(settings.ask, stop=("x",)))},
        "method.positions": {
            "settings": replace(settings, method=replace(settings.method, positions="composite"))
        },
        "template.final": {
            "settings": replace(settings, template=replace(settings.template, final="{question}"))
        },
        "kb": {"settings": replace(settings, kb=None)},
        "sampling.seed": {"sampling": replace(WARM, seed=6)},
        "shard": {"shard": Shard(0, 2)},
    }
    for name, change in changes.items():
        with refused(ConfigError, name):
            answer(LINES, **change)
    with refused(ConfigError):
        answer([*LINES, {"question": "one more"}])
    assert answer.out.read_bytes() == before
    answer(LINES, batch_size=3)  # this one changes nothing that is written


def test_a_file_in_use_is_refused(answer):
    with AnswerFile(answer.out, {}), refused(ConfigError):
        AnswerFile(answer.out, {})
    with answer.out.open("a") as held:  # the lock is gone with its owner
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_foreign_file_is_left_as_it_is(answer, tmp_path):
    answer.out.write_text("my notes, without a line end")
    with refused(ConfigError):
        answer(LINES)
    assert answer.out.read_text() == "my notes, without a line end"
    assert not settings_path(answer.out).exists()
    with refused(ConfigError):
        answer(LINES, out=tmp_path / "missing" / "answers.jsonl")
    settings_path(answer.out).write_text("{")
    with refused(ConfigError):
        answer(LINES)


def test_a_line_that_is_no_answer_is_refused(tmp_path):
    path = tmp_path / "answers.jsonl"
    AnswerFile(path, {}).__exit__(None, None, None)
    for line in ("[]", "{}", "nothing", '{"id": []}'):
        path.write_text('{"id": 1}\n' + line + "\n")
        with refused(ConfigError, "2"):
            AnswerFile(path, {})


def test_without_a_knowledge_base_questions_bring_documents(answer, text_model):
    settings = resolve(
        Ask(method="turborag", template="plain", k=5, max_new_tokens=3), model=text_model
    )
    kept = {*engine_of(text_model).memory.keys()}
    report = answer([LINES[2], LINES[0]], settings=settings)
    assert [bad.id for bad in report.refused] == ["salt"]
    assert "no documents to answer from" in report.refused[0].reason
    assert report.answered == 1
    assert {*engine_of(text_model).memory.keys()} == kept  # a long run does not fill the memory


def test_documents_whose_neighbours_nobody_knows_are_refused_line_by_line(
    answer, text_model, tmp_path
):
    ask = Ask(method="fusionrag", template="plain", max_new_tokens=3)
    report = answer([LINES[2]], settings=resolve(ask, model=text_model))
    assert "neighbours='prompt'" in report.refused[0].reason and not report.answered
    settings = resolve(ask, model=text_model, neighbours="prompt")
    with refused(ConfigError, "neighbours"):  # the file was begun with others
        answer([LINES[2]], settings=settings)
    other = tmp_path / "prompt.jsonl"
    assert answer([LINES[2]], settings=settings, out=other).answered == 1
    assert any("an oracle" in note for note in read(other)[0]["notes"])


def test_settings_that_serve_no_question_are_refused_before_the_file_is_made(answer, settings):
    chat = PromptTemplate("chat", "", "{text}", "{question}", chat=True)
    with refused(TokenizerError):
        answer(LINES, settings=dataclasses.replace(settings, template=chat))
    with refused(RequestError, "batch_size=0"):
        answer(LINES, batch_size=0)
    assert not answer.out.exists()
    assert not settings_path(answer.out).exists()


@pytest.mark.parametrize(("raw", "name", "words"), BAD, ids=[words for _, _, words in BAD])
def test_bad_lines_have_a_name_and_a_reason(tmp_path, raw, name, words):
    path = tmp_path / "questions.jsonl"
    path.write_bytes(raw + b"\n\n" + b'{"question": "fine"}')
    bad, fine = QuestionFile.open(path).entries(Shard())
    assert isinstance(bad, BadQuestion)
    assert bad.id == name
    assert words in bad.reason
    assert fine == FileQuestion(3, "fine", None)


def test_questions_are_split_by_line(tmp_path):
    path = write(tmp_path / "questions.jsonl", [{"question": str(i)} for i in range(7)])
    file = QuestionFile.open(path)
    shards = [[q.text for q in file.entries(Shard(i, 3))] for i in range(3)]
    assert shards == [["0", "3", "6"], ["1", "4"], ["2", "5"]]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([{"id": "a", "question": "x"}] * 2, "'a'"),
        ([{"id": 2, "question": "x"}, {"question": "y"}], "'2'"),
        ([{"id": "3", "question": "x"}, {"id": 3, "question": "y"}], ""),
        ([], ""),
    ],
)  # fmt: skip
def test_question_file_is_refused(tmp_path, lines, words):
    with refused(RequestError, words):
        QuestionFile.open(write(tmp_path / "questions.jsonl", lines))


def test_question_file_that_cannot_be_read(tmp_path):
    with refused(RequestError):
        QuestionFile.open(tmp_path / "missing.jsonl")
    with refused(RequestError):
        QuestionFile.open(tmp_path)


@pytest.mark.parametrize("text", ["", "1", "2/2", "a/b", "-1/2", "0/0", "1/2/3", " 0/1"])
def test_bad_shards(text):
    with refused(ConfigError, "0"):
        Shard.parse(text)
    assert Shard.parse("1/2") == Shard(1, 2)


@pytest.fixture
def script(kb_dir, tmp_path, capsys):
    """Run `jaxrag generate` in this process: exit code, stdout, stderr."""

    def call(*arguments, kb=kb_dir):
        given = () if kb is None else ("--kb", kb)
        out = ("--out", tmp_path / "answers.jsonl", "--cache-tokens", 8192, "--max-new-tokens", 3)
        capsys.readouterr()
        code = main(["generate", *(str(a) for a in (*out, *given, *arguments))])
        return code, *capsys.readouterr()

    return call


def test_script_without_a_knowledge_base(script, model_dir, tmp_path):
    questions = write(tmp_path / "questions.jsonl", [LINES[2]])
    code, _, err = script("--questions", questions, kb=None)
    assert (code, err.count("\n")) == (1, 1)
    assert "pass --kb DIR, or --model DIR" in err
    given = ("--model", model_dir, "--template", "plain")
    assert script("--questions", questions, *given, kb=None)[0] == 0
    assert len(read(tmp_path / "answers.jsonl")) == 1
    (tmp_path / "answers.jsonl").unlink()
    (tmp_path / "answers.jsonl.settings.json").unlink()
    given = (*given, "--method", "fusionrag", "--questions", questions)
    code, _, err = script(*given, kb=None)
    assert code == 3 and "pass kb= to find some in, or neighbours='prompt'" in err
    out = tmp_path / "prompt.jsonl"
    assert script(*given, "--neighbours", "prompt", "--out", out, kb=None)[0] == 0
    assert any("an oracle" in note for note in read(out)[0]["notes"])


def test_script_refuses_before_the_model_is_read(script, tmp_path):
    gone = tmp_path / "gone.jsonl"
    assert "gone.jsonl" in script("--questions", gone, kb=tmp_path / "none")[2]
    questions = write(tmp_path / "questions.jsonl", LINES)
    _, _, err = script("--questions", questions, "--shard", "2/2", kb=tmp_path / "none")
    assert "shard '2/2'" in err
    assert not (tmp_path / "answers.jsonl").exists()
