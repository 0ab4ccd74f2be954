"""The quality gate: what it measures, what it stores, and what is refused."""

import json
import re

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import KnowledgeBaseError, RequestError
from jaxrag.base.types import FINAL
from jaxrag.cli import main
from jaxrag.engine.sampling import SamplingParams
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.measure.evals.gate import forced_logits, gate, kl_divergence
from jaxrag.measure.evals.options import GateOptions, Target
from jaxrag.reuse.methods import METHODS
from jaxrag.serve.ask import Ask
from jaxrag.serve.generate import generate
from jaxrag.serve.question_files import QuestionFile
from jaxrag.serve.questions import prepare, resolve

DOCUMENTS = [
    {"id": "tea", "text": "Tea grows on the hills of the village and is sold in blue boxes."},
    {"id": "salt", "text": "Salt is carried to the village by mules every second week."},
    {"id": "oak", "text": "The oven of the village is fired with oak from the king's forest."},
]
PROBES = [
    "Where in the village does tea grow?",
    "Who carries the salt to the village?",
    "Which wood fires the oven of the village?",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, text_model):
    path = tmp_path_factory.mktemp("gate") / "kb"
    how = {
        "template": "plain",
        "encoders": ["after_prefix"],
        "stored": "native",
    }  # exact at ratio 1
    with KnowledgeBase.open(path, text_model, **how) as kb:
        kb.add(DOCUMENTS)
    return path


@pytest.fixture
def kb(folder, text_model):
    with KnowledgeBase.open(folder, text_model) as kb:
        yield kb
        settings = kb._catalog.settings()
        kb._catalog.forget([name for name in settings if name.startswith("gate:")])


@pytest.fixture(scope="module")
def probes(tmp_path_factory):
    path = tmp_path_factory.mktemp("probes") / "probes.jsonl"
    path.write_text("".join(json.dumps({"question": q}) + "\n" for q in PROBES))
    return QuestionFile.open(path)


def test_forced_logits_are_those_of_the_whole_text(kb):
    method = METHODS["cacheblend"].with_ratio(1)
    settings = resolve(Ask(method=method, k=3, max_new_tokens=5), kb=kb)
    questions = [prepare(settings, q, None, SamplingParams()) for q in PROBES]
    answers = [[7, 300, 11, 5], [], [42]]
    found, recomputed = forced_logits(settings, questions, answers)
    prompts = [question.prompt for question in questions]
    for p, answer, logits in zip(prompts, answers, found, strict=True):
        ids = np.concatenate((p.prefix, *p.chunks, p.final, np.array(answer, np.int32)))
        pad = (0, 512 - len(ids))  # one shape compiles once
        segments = np.pad(np.full(len(ids), FINAL), pad)[None]
        whole = np.asarray(kb.model.logits(np.pad(ids, pad)[None], segments=segments))
        wanted = whole[0, len(ids) - len(answer) - 1 : len(ids)]
        np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=1e-4)
    chunks = [p.chunks for p in prompts]
    first_is_exact = sum(len(ids) for one in chunks for ids in one[1:])
    assert recomputed == first_is_exact


def test_kl_divergence_is_in_nats():
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.25, 0.5])
    found = kl_divergence(np.log([p, p]) + 3, np.log([q, p]).astype(np.float32))
    np.testing.assert_allclose(found, [0.25 * np.log(2), 0], atol=1e-6)


def test_the_smallest_ratio_that_meets_the_target_is_used_from_then_on(kb, probes, folder):
    method = METHODS["cacheblend"]
    report = gate(kb, probes, GateOptions(method, ratios=(1.0, 0.0), target=Target(1.0, 1e-6), k=3))
    assert [one.ratio for one in report.measured] == [0.0, 1.0]
    reuse, whole = report.measured
    assert (whole.agreement.value, whole.answers.value, whole.meets) == (1, 1, True)
    assert whole.kl < 1e-8 < 1e-6 < reuse.kl and not reuse.meets
    assert reuse.recomputed == 0 < whole.recomputed < 1
    assert report.ratio == 1.0 and report.questions == 3

    def ask(**options):
        return generate(PROBES[0], kb=kb, k=3, max_new_tokens=3, **options)

    gated = ask(method="cacheblend")
    assert len(gated.sources) == 3
    assert 0 < gated.counts["reused"] < gated.counts["recomputed"]  # the first chunk is exact
    assert any("recompute_ratio 1, as the knowledge base's gate" in note for note in gated.notes)
    assert gated.token_ids == ask(method="full_attention").token_ids
    # A ratio that is named, a method that is given whole, and other methods are left alone.
    for options in ({"method": "cacheblend", "recompute_ratio": 0.15}, {"method": method}):
        out = ask(**options)
        assert out.notes == [] and 0 < out.counts["recomputed"] < gated.counts["recomputed"]
    assert not any("gate" in note for note in ask(method="full_reuse").notes)
    # Another prompt format was not measured.
    other = ask(method="cacheblend", template="turborag")
    assert any("other settings" in note for note in other.notes)
    assert kb.stats()["gates"] == {"cacheblend": 1.0}
    with KnowledgeBase.open(folder) as again:
        assert again.gates["cacheblend"]["ratio"] == 1.0
        with refused(KnowledgeBaseError):
            again.set_gate("cacheblend", {})


def test_nothing_is_stored_where_no_ratio_will_do(kb, probes):
    report = gate(kb, probes, GateOptions(METHODS["full_reuse"], target=Target(0.0, 0.0), k=3))
    assert report.ratio is None and not report.measured[0].meets
    assert kb.gates == {}


def test_answers_are_those_that_greedy_decoding_agrees_on(kb, probes):
    (one,) = gate(
        kb, probes, GateOptions(METHODS["full_reuse"], target=Target(0.0, 9.0), k=3)
    ).measured
    both = [
        [generate(q, kb=kb, k=3, max_new_tokens=8, method=METHODS[name]).token_ids for q in PROBES]
        for name in ("full_reuse", "full_attention")
    ]
    same = [a == b for a, b in zip(*both, strict=True)]
    assert one.answers.value == pytest.approx(sum(same) / 3)


def test_nonsense_is_refused(kb, probes, folder, tmp_path):
    epic = METHODS["epic"]
    with refused(RequestError):
        gate(kb, probes, GateOptions(METHODS["full_attention"]))
    with refused(RequestError):
        gate(kb, probes, GateOptions(METHODS["turborag"], ratios=(0.3,)))
    with refused(RequestError):
        gate(kb, probes, GateOptions(epic, ratios=()))
    with refused(RequestError, "--target-agreement 1"):
        Target(agreement=1.5)
    with refused(RequestError, "--max-kl nan"):
        Target(max_kl=float("nan"))
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"id": "a", "question": "Tea?"}\n{"id": "b"}\n')
    with refused(RequestError, "'b'"):
        gate(kb, QuestionFile.open(bad), GateOptions(epic))
    bad.write_text('{"question": "Tea?", "documents": []}\n')
    with refused(RequestError, "1"):
        gate(kb, QuestionFile.open(bad), GateOptions(epic))
    with KnowledgeBase.open(folder, kb.model, mode="r") as reading, refused(KnowledgeBaseError):
        gate(reading, probes, GateOptions(epic))


@pytest.mark.slow
def test_command(kb, probes, folder, model_dir, capsys):
    def jaxrag(*arguments):
        code = main([str(a) for a in (*arguments, "--model", model_dir, "--cache-tokens", 4096)])
        return code, *capsys.readouterr()

    call = ("kb", "gate", folder, "--questions", probes.path, "--method", "cacheblend", "--k", 3)
    code, out, err = jaxrag(*call, "--recompute-ratios", "0", "--max-kl", "0", "--json")
    assert (code, json.loads(out)["ratio"]) == (3, None)
    assert "refused" in err and "nothing was stored" in err
    with KnowledgeBase.open(folder) as again:
        assert again.gates == {}
    code, out, err = jaxrag(*call, "--recompute-ratios", "0,1", "--max-kl", "1e-6")
    assert code == 0 and "remembered: cacheblend recomputes every chunk token where no" in out
    asked = ("ask", PROBES[0], "--kb", folder, "--method", "cacheblend", "--k", 3, "--json")
    code, out, _ = jaxrag(*asked, "--max-new-tokens", 2)
    assert any("gate found" in note for note in json.loads(out)["notes"])
    assert main(["kb", "stats", str(folder)]) == 0
    assert re.search("gates cacheblend +1.0", capsys.readouterr().out)
