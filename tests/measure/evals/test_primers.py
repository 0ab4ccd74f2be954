"""`jaxrag kb prime`: what it measures, which primer it takes, and what becomes of the old KV."""

import dataclasses
import json

import numpy as np
import pytest
from refusal import refused

import jaxrag
from jaxrag.base.errors import ConfigError, KnowledgeBaseError, RequestError
from jaxrag.cli import main
from jaxrag.engine.engine import engine_of
from jaxrag.kv.store import MemoryStore
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.measure.evals.gate import gate, measure, prepared_questions
from jaxrag.measure.evals.options import GateOptions, PrimeOptions, Target
from jaxrag.measure.evals.primers import UNPRIMED, PrimeRow, choice, prime, primers_of
from jaxrag.reuse.encode import Primer, primer_named
from jaxrag.reuse.encode.primer import PrimerPassage, PrimerVectors, write_vectors
from jaxrag.reuse.methods import METHODS
from jaxrag.serve.ask import Ask
from jaxrag.serve.question_files import QuestionFile
from jaxrag.serve.questions import resolve

DOCUMENTS = [
    {"id": "tea", "text": "Tea grows on the hills of the village and is sold in blue boxes."},
    {"id": "salt", "text": "Salt is carried to the village by mules every second week."},
    {"id": "oak", "text": "The oven of the village is fired with oak from the king's forest."},
]
QUESTIONS = [
    "Where in the village does tea grow?",
    "Who carries the salt to the village?",
    "Which wood fires the oven of the village?",
]
WEIR = Primer("weir", (PrimerPassage("weir", "A weir is built of stone."),))
FEW = {"answer_tokens": 4, "k": 3}


@pytest.fixture
def weir(tmp_path):
    path = tmp_path / "weir.toml"
    path.write_text('[[passages]]\ntitle = "weir"\ntext = "A weir is built of stone."\n')
    return str(path)


@pytest.fixture
def vectors(tmp_path, text_model):
    """The file of three vectors for the model."""
    values = np.random.default_rng(3).normal(size=(3, text_model.config.model_dim)) / 8
    path = tmp_path / "trained.safetensors"
    found = PrimerVectors.of(text_model.digest, values.astype(np.float32))
    write_vectors(Primer("trained", vectors=found), path)
    return str(path)


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"question": q}) + "\n" for q in QUESTIONS))
    return QuestionFile.open(path)


@pytest.fixture
def opened(text_model, tmp_path):
    """``opened(**settings)``: a knowledge base of three chunks."""

    def call(name="kb", **settings):
        there = (tmp_path / name).exists()
        if not there:
            settings = {"template": "plain", "chunk_tokens": 60} | settings
        kb = KnowledgeBase.open(tmp_path / name, text_model, **settings)
        if not there:
            kb.add(DOCUMENTS)
        return kb

    return call


@pytest.fixture(autouse=True)
def shipped(request, monkeypatch):
    """None of the shipped texts, which are long, but where a test asks for them by its name."""
    if "shipped" not in request.node.name:
        monkeypatch.setattr("jaxrag.measure.evals.primers.config_names", lambda kind: [])


@pytest.fixture
def taken(monkeypatch):
    """``taken(name)``: the choice falls on this candidate."""

    def call(name):
        def choose(candidates):
            return next(one for one in candidates if one.name == name)

        monkeypatch.setattr("jaxrag.measure.evals.primers.choice", choose)

    return call


def primed_keys(kb):
    """Under which the store has KV behind the primer, as the catalog names them."""
    return {kb._catalog.keys(it["id"])["primed"][0] for it in DOCUMENTS}


def measured(kb, questions, method):
    """Mean KL and agreement of a method over the base's own store, as the gate has them."""
    ask = Ask(k=FEW["k"], max_new_tokens=FEW["answer_tokens"])
    both = [METHODS["full_attention"], method]
    settings = [resolve(dataclasses.replace(ask, method=it), kb=kb) for it in both]
    prepared = [prepared_questions(one, questions) for one in settings]
    report = measure(settings, prepared, GateOptions(method))
    [found] = report.measured
    return found.kl, found.agreement.value, report.answer_tokens


def test_a_candidate_is_measured_as_the_gate_measures_what_is_stored(opened, questions, weir):
    own = ["primed", "after_prefix", "neighbours"]
    with opened(encoders=own, primer=weir) as kb:
        before = set(kb.store.keys()), kb.counts()
        report = prime(kb, questions, PrimeOptions(**FEW))
        assert (set(kb.store.keys()), kb.counts()) == before  # nothing is added
        rows = {one.name: one for one in report.candidates}
        assert rows.keys() >= {"weir", *UNPRIMED}
        for name, method in {**UNPRIMED, "weir": METHODS["primed"]}.items():
            kl, same, tokens = measured(kb, questions, method)
            assert kl > 0
            assert rows[name].kl["value"] == pytest.approx(kl, rel=1e-9)
            assert rows[name].same_tokens["value"] == pytest.approx(same)
            assert tokens == report.answer_tokens
        assert rows["weir"].primer_tokens == len(kb.primer.tokens(kb.template, kb._tokenizer(None)))
        assert [rows[it].variants for it in ("weir", "after_prefix", "neighbours")] == [1, 1, 2]
        assert rows["neighbours"].bytes_per_token == 2 * rows["weir"].bytes_per_token
        assert rows[report.least].kl_minus_least["value"] == 0


def test_kv_of_candidates_is_dropped_and_never_stored(opened, questions, weir, monkeypatch):
    stores = []

    def made(*args, **more):
        stores.append(MemoryStore(*args, **more))
        return stores[-1]

    monkeypatch.setattr("jaxrag.measure.evals.primers.MemoryStore", made)
    with opened(encoders=["isolated"]) as kb:
        before = set(kb.store.keys())
        prime(kb, questions, PrimeOptions((weir,), **FEW))
        assert set(kb.store.keys()) == before
    [one] = stores
    assert list(one.keys()) == []


def candidate(name, low, value, cost):
    """A candidate whose KL is ``value``, and at least ``low`` above the least."""
    kl, minus = ({"value": it, "low": it, "high": it} for it in (value, low))
    variants, tokens = cost
    return PrimeRow(name, "primed", tokens, variants, 1.0, kl, minus, kl)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([("a", 0, 0.1, (1, 300)), ("b", 0.01, 0.2, (1, 0))], "a"),  # dearer, and nearer
        ([("a", 0, 0.1, (1, 300)), ("b", -0.01, 0.2, (1, 0))], "b"),  # cheaper, as near
        ([("a", 0, 0.1, (1, 32)), ("b", -0.01, 0.2, (1, 300))], "a"),
        ([("a", 0, 0.1, (2, 0)), ("b", -0.01, 0.2, (1, 300))], "b"),  # a variant less
        ([("a", 0, 0.1, (1, 300)), ("b", -0.01, 0.2, (2, 0))], "a"),
        ([("a", 0, 0.1, (1, 9)), ("b", -0.01, 0.3, (1, 8)), ("c", -0.01, 0.2, (1, 8))], "c"),
    ],
)
def test_the_least_is_chosen_or_what_is_cheaper_and_as_near(rows, expected):
    assert choice([candidate(*row) for row in rows]).name == expected


def test_it_is_remembered_and_used_by_the_next_ingest(opened, questions, vectors, taken):
    taken("trained")
    with opened(encoders=["isolated"]) as kb:
        report = prime(kb, questions, PrimeOptions((vectors,), **FEW))
        assert (report.taken, report.chosen, report.before, report.stored) == (
            True, "trained", None, 0,
        )  # fmt: skip
        assert kb.primer.same(primer_named(vectors)) and kb.encoders == ("isolated",)
    with opened(encoders=["primed"]) as kb:
        assert kb.primer.same(primer_named(vectors)) and kb.stats()["primer"] == "trained"
        assert kb.add(DOCUMENTS).encoded == 3
        found = jaxrag.generate(QUESTIONS[0], kb=kb, method="primed", k=3, max_new_tokens=2)
        assert found.counts["encoded"] == 0 < found.counts["reused"]
        assert prime(kb, questions, PrimeOptions(**FEW)).taken  # as it is


def test_what_is_stored_behind_another_is_replaced_only_when_asked(
    opened, questions, weir, vectors, taken
):
    question = {"question": QUESTIONS[0], "k": 3, "max_new_tokens": 6, "method": "primed"}
    with opened("fresh", encoders=["primed"], primer=weir) as kb:
        engine_of(kb.model).forget()
        fresh = jaxrag.generate(kb=kb, **question)
    taken("weir")
    with opened(encoders=["primed"], primer=vectors) as kb:
        gate(kb, questions, GateOptions("primed", target=Target(0, 99), k=3))
        gate(kb, questions, GateOptions("full_reuse", target=Target(0, 99), k=3))
        old = primed_keys(kb)
        report = prime(kb, questions, PrimeOptions((weir,), **FEW))
        assert (report.taken, report.before, report.stored) == (False, "trained", 3)
        assert kb.primer.name == "trained" and kb.counts()["encoded"] == {"primed": 3}
        assert prime(kb, questions, PrimeOptions((weir,), replace=True, **FEW)).taken
        assert kb.primer.name == "weir" and kb.counts()["encoded"] == {}
        assert list(kb.gates) == ["full_reuse"]  # that of primed was for the other primer
    with opened() as kb:
        assert kb.primer.name == "weir" and kb.verify().whole and old <= set(kb.store.keys())
        engine_of(kb.model).forget()
        cold = jaxrag.generate(kb=kb, **question)  # none of the old KV is read
        assert cold.token_ids == fresh.token_ids and cold.counts["encoded"] > 0
        report = kb.add(DOCUMENTS)
        assert report.unchanged == 3 and kb.counts()["encoded"] == {"primed": 3}
        engine_of(kb.model).forget()
        warm = jaxrag.generate(kb=kb, **question)
        assert warm.token_ids == fresh.token_ids and warm.counts["encoded"] == 0
        kb.gc(grace_seconds=0)
        left = set(kb.store.keys())
        assert primed_keys(kb) <= left and not left & old and kb.verify().whole


def test_a_shipped_text_that_leaves_no_room_for_chunks_is_left_out(opened, questions):
    with opened(chunk_tokens=900, encoders=["isolated"]) as kb:
        report = prime(kb, questions, PrimeOptions(**FEW))
    assert {one.name for one in report.candidates} == set(UNPRIMED)
    assert set(report.left_out) == {"bakery", "lamps", "tides"} and report.chosen in UNPRIMED
    assert all("1024 positions" in why for why in report.left_out.values())


def test_shipped_and_other_primers_are_measured_once_by_names_of_their_own(opened, weir, tmp_path):
    other = tmp_path / "tides.toml"
    other.write_text('[[passages]]\ntitle = ""\ntext = "Mud."\n')
    (tmp_path / "neighbours.toml").write_text('[[passages]]\ntitle = ""\ntext = "Sand."\n')
    sand = str(tmp_path / "neighbours.toml")
    with opened(encoders=["primed"], primer=weir) as kb:
        found = primers_of(kb, ("tides", weir, str(other), sand))
        assert set(found) == {"bakery", "lamps", "tides", "weir", str(other), sand}
        assert found["tides"] == primer_named("tides")


def test_nonsense_is_refused(opened, questions, text_model, tmp_path, weir):
    with refused(RequestError, "--answer-tokens 0"):
        PrimeOptions(answer_tokens=0)
    wide = text_model.config.model_dim
    foreign = tmp_path / "foreign.safetensors"
    found = PrimerVectors.of("f" * 32, np.ones((2, wide), np.float32))
    write_vectors(Primer("foreign", vectors=found), foreign)
    long = tmp_path / "long.toml"
    long.write_text(f'[[passages]]\ntitle = ""\ntext = "{"a weir " * 900}"\n')
    with opened(encoders=["isolated"]) as kb:
        with refused(ConfigError, "'foreign'"):
            prime(kb, questions, PrimeOptions((str(foreign),), **FEW))
        with refused(KnowledgeBaseError, "'long'", 1024):
            prime(kb, questions, PrimeOptions((str(long),), **FEW))
        with refused(RequestError, "bad.jsonl"):
            bad = tmp_path / "bad.jsonl"
            bad.write_text('{"question": "Tea?"}\n{"id": 2}\n')
            prime(kb, QuestionFile.open(bad), PrimeOptions(**FEW))
        with refused(KnowledgeBaseError, "'long'", 1024):
            kb.set_primer(primer_named(str(long)))
        folder = kb.path
    for model in (None, text_model):
        with KnowledgeBase.open(folder, model, mode="r") as kb:
            with refused(KnowledgeBaseError):
                prime(kb, questions, PrimeOptions(**FEW))
            with refused(KnowledgeBaseError):
                kb.set_primer(WEIR)


def test_command(opened, questions, weir, vectors, model_dir, capsys, tmp_path, taken):
    opened(encoders=["isolated"]).close()

    def jaxrag(*arguments):
        call = ("kb", "prime", tmp_path / "kb", *arguments, "--model", model_dir)
        code = main([str(it) for it in (*call, "--cache-tokens", 4096)])
        return code, *capsys.readouterr()

    few = ("--questions", questions.path, "--answer-tokens", 2, "--k", 2)
    code, out, err = jaxrag("--questions", tmp_path / "none.jsonl")
    assert (code, out, err.count("\n")) == (1, "", 1) and "none.jsonl" in err
    code, out, err = jaxrag(*few, "--primer", "lighthouse")
    assert (code, out, err.count("\n")) == (1, "", 1) and "'lighthouse'" in err
    taken("after_prefix")
    code, out, err = jaxrag(*few)
    assert code == 3 and "nothing was remembered" in out and "--method full_reuse" in out
    taken("weir")
    code, out, err = jaxrag(*few, "--primer", weir)
    assert code == 0 and "remembered: weir" in out and "--encoder primed" in out
    code, out, err = jaxrag(*few, "--json")
    found = json.loads(out)
    assert code == 0 and found["chosen"] == found["before"] == "weir" and found["taken"]
    with opened(encoders=["primed"]) as kb:
        kb.add(DOCUMENTS)
    taken("trained")
    code, out, err = jaxrag(*few, "--primer", vectors)
    assert code == 3 and "3 chunks stored behind weir" in out and "--replace" in out
    code, out, err = jaxrag(*few, "--primer", vectors, "--replace")
    assert (
        code == 0
        and "3 chunks stored behind weir are read no more" in out
        and "jaxrag kb gc" in out
    )
