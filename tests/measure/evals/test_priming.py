"""`jaxrag train primer`: prompts of a knowledge base and of a data set, and what is refused."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from dataset_fixtures import write
from refusal import refused

from jaxrag import KnowledgeBase
from jaxrag.base.errors import RequestError
from jaxrag.cli import main
from jaxrag.measure.evals.priming import PrimingOptions, start_vectors
from jaxrag.models.text.prompts import TEMPLATES
from jaxrag.reuse.encode import Primer, primer_named
from jaxrag.reuse.encode.primer import write_vectors

FEW = (
    "--vectors",
    5,
    "--steps",
    3,
    "--every",
    1,
    "--num-held-out",
    2,
    "--answer-tokens",
    3,
    "--json",
)


@pytest.fixture
def jaxrag(capsys):
    """Run the program in this process: exit code, stdout, stderr."""

    def call(*arguments):
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def weir(tmp_path):
    path = tmp_path / "weir.toml"
    path.write_text('[[passages]]\ntitle = "weir"\ntext = "A weir is built of stone."\n')
    return path


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    rows = [json.dumps({"question": f"where is the mill of part {n}?"}) for n in range(5)]
    path.write_text("\n".join(rows) + "\n")
    return path


def test_over_ones_own_chunks_and_back_into_a_knowledge_base(
    jaxrag, text_model, model_dir, tmp_path, weir, questions
):
    with KnowledgeBase.open(tmp_path / "kb", text_model, encoders=["isolated"]) as kb:
        text = " ".join(f"the mill of part {n} stands by the weir." for n in range(12))
        kb.add([{"id": "a", "text": text}])
    out = tmp_path / "mine.safetensors"
    command = ("train", "primer", "--kb", tmp_path / "kb", "--questions", questions, "--out", out)
    code, said, err = jaxrag(*command, *FEW, "--start", weir)
    assert code == 0, err
    found = json.loads(said)
    assert found["prompts"] == 3 and [it["step"] for it in found["held_out_kl"]] == [0, 1, 2, 3]
    assert all(it["kl"] > 0 for it in found["held_out_kl"])
    kept = Path(f"{out}.answers.jsonl").read_text().splitlines()
    assert len(kept) == 5
    code, again, err = jaxrag(*command, *FEW, "--start", weir)  # from these
    assert code == 0 and json.loads(again)["held_out_kl"] == found["held_out_kl"], err
    assert Path(f"{out}.answers.jsonl").read_text().splitlines() == kept
    primer = primer_named(str(out))
    assert primer.vectors.model == text_model.digest and primer.vectors.width == found["width"]
    (tmp_path / "mill.txt").write_text(text)
    ingest = ("ingest", tmp_path / "mill.txt", "--kb", tmp_path / "new", "--model", model_dir)
    code, _, err = jaxrag(*ingest, "--encoder", "primed", "--primer", out)
    assert code == 0, err
    ask = ("ask", "where is the mill?", "--kb", tmp_path / "new", "--method", "primed", "--json")
    code, said, err = jaxrag(*ask, "--max-new-tokens", 3)
    assert code == 0 and json.loads(said)["counts"]["encoded"] == 0, err


def test_over_a_data_set(jaxrag, model_dir, tmp_path, weir):
    out = tmp_path / "nq.safetensors"
    data = ("--dataset", "nq_open", "--data", write("nq_open", tmp_path), "--passages", 2)
    command = ("train", "primer", *data, "--template", "plain", "--model", model_dir, "--out", out)
    code, said, err = jaxrag(*command, *FEW, "--num-held-out", 1, "--start", weir)
    assert code == 0, err
    assert json.loads(said)["prompts"] > 0 and primer_named(str(out)).vectors is not None


def test_packets_are_trained_and_measured_over_a_data_set(
    jaxrag, model_dir, text_model, tmp_path, weir
):
    out, data = tmp_path / "nq.safetensors", write("nq_open", tmp_path)
    of = ("--template", "plain", "--model", model_dir, "--passages", 2)
    command = ("train", "primer", "--form", "packets", "--dataset", "nq_open", "--data", data, *of)
    code, said, err = jaxrag(*command, "--out", out, *FEW, "--num-held-out", 1, "--start", weir)
    assert code == 0, err
    assert json.loads(said)["held_out_kl"][0]["kl"] > 0
    held = primer_named(str(out))
    assert held.wraps and held.vectors.header == 3 and held.vectors.array().shape[0] == 5
    command = ("eval", "near", "nq_open", "--data", data, *of, "--answer-tokens", 3, "--num", 2)
    methods = ("--method", "full_reuse", "--method", "packets", "--method", "primed")
    code, said, err = jaxrag(*command, *methods, "--primer", out, "--primer", weir, "--json")
    assert code == 0, err
    full, packets, primed = json.loads(said)["rows"]
    assert [packets["method"], primed["method"]] == ["packets nq", "primed weir"]
    assert packets["kl"]["value"] != full["kl"]["value"] and packets["recomputed"] == 0
    assert packets["bytes_per_token"] > primed["bytes_per_token"] == full["bytes_per_token"]
    code, _, err = jaxrag(*command, "--method", "packets", "--primer", weir)
    assert code == 1 and "--form packets" in err and err.count("\n") == 1


def test_layers_begin_as_near_as_vectors_and_are_measured(jaxrag, model_dir, tmp_path, weir):
    data = write("nq_open", tmp_path)
    of = ("--template", "plain", "--model", model_dir, "--passages", 2)
    command = ("train", "primer", "--dataset", "nq_open", "--data", data, *of, *FEW)
    command = (*command, "--num-held-out", 1)
    looks = {}
    for form in ("primer", "layers"):
        out = tmp_path / f"{form}.safetensors"
        code, said, err = jaxrag(*command, "--form", form, "--out", out, "--start", weir)
        assert code == 0, err
        looks[form] = [it["kl"] for it in json.loads(said)["held_out_kl"]]
    assert looks["layers"][0] == pytest.approx(looks["primer"][0], rel=1e-4)
    assert looks["layers"][-1] != looks["layers"][0] and looks["layers"] != looks["primer"]
    again = tmp_path / "again.safetensors"  # on from KV, and from vectors
    for form in ("layers", "primer"):
        start = ("--start", tmp_path / f"{form}.safetensors", "--form", "layers", "--out", again)
        code, said, err = jaxrag(*command, *start)
        assert code == 0, err
        [first, *_] = json.loads(said)["held_out_kl"]
        assert first["kl"] == pytest.approx(looks[form][-1], rel=1e-4)
    code, _, err = jaxrag(*command, "--start", out, "--out", tmp_path / "x.safetensors")
    assert code == 1 and "--form layers" in err and err.count("\n") == 1
    foreign = dataclasses.replace(primer_named(str(out)).vectors, model="0" * 64)
    write_vectors(Primer("foreign", vectors=foreign), tmp_path / "foreign.safetensors")
    start = ("--start", tmp_path / "foreign.safetensors", "--form", "layers")
    code, _, err = jaxrag(*command, *start, "--out", tmp_path / "x.safetensors")
    assert code == 1 and "'foreign'" in err and err.count("\n") == 1
    near = ("eval", "near", "nq_open", "--data", data, *of, "--answer-tokens", 3, "--num", 2)
    methods = ("--method", "full_reuse", "--method", "primed", "--primer", out, "--primer", weir)
    code, said, err = jaxrag(*near, *methods, "--json")
    assert code == 0, err
    full, layers, text = json.loads(said)["rows"]
    assert [layers["method"], text["method"]] == ["primed layers", "primed weir"]
    assert layers["kl"]["value"] not in (full["kl"]["value"], text["kl"]["value"])
    assert layers["recomputed"] == 0 and layers["bytes_per_token"] == full["bytes_per_token"]
    code, _, err = jaxrag(*near, "--method", "packets", "--primer", out)
    assert code == 1 and "--form packets" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), ("--kb", "--dataset")),
        (("--kb", "kb"), ("--questions",)),
        (("--kb", "kb", "--vectors", 0), ("--vectors 0",)),
        (("--kb", "kb", "--vectors", 2000), ("2000", "1024")),
        (("--kb", "kb", "--num-held-out", -1), ("held_out=-1",)),
        (("--kb", "kb", "--steps", 0), ("steps=0",)),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(jaxrag, tmp_path, words, expected):
    code, out, err = jaxrag("train", "primer", *words, "--out", tmp_path / "x.safetensors")
    assert (code, out) == (1, "") and err.count("\n") == 1
    assert all(it in err for it in expected)
    assert not list(tmp_path.iterdir())


def test_another_ending_is_refused(jaxrag, tmp_path):
    code, _, err = jaxrag("train", "primer", "--kb", "kb", "--out", tmp_path / "x.toml")
    assert code == 1 and "x.toml" in err and ".safetensors" in err and err.count("\n") == 1


def test_vectors_begin_as_the_end_of_a_text(text_model, weir):
    template, tokenizer = TEMPLATES["plain"], text_model.text_tokenizer()
    ids = primer_named(str(weir)).tokens(template, tokenizer)
    table = np.asarray(text_model.params.embed).astype(np.float32)
    np.testing.assert_array_equal(
        start_vectors(text_model, template, str(weir), 4), table[ids[-4:]]
    )
    long = start_vectors(text_model, template, str(weir), len(ids) + 2)
    np.testing.assert_array_equal(long[-2:], table[ids[:2]])  # from its beginning again


def test_too_few_questions_are_refused(jaxrag, text_model, tmp_path, questions):
    with KnowledgeBase.open(tmp_path / "kb", text_model, encoders=["isolated"]) as kb:
        kb.add([{"id": "a", "text": "the mill stands by the weir."}])
    out = tmp_path / "mine.safetensors"
    command = ("train", "primer", "--kb", tmp_path / "kb", "--questions", questions, "--out", out)
    code, _, err = jaxrag(*command, "--num-held-out", 5)
    assert code == 1 and "5 questions" in err and err.count("\n") == 1


def test_options_name_what_is_wrong():
    with refused(RequestError, "skip=-1"):
        PrimingOptions(skip=-1, out="x.safetensors")
