"""The study of primers on a small model: its texts, what chunks are behind, rows, and resuming."""

import dataclasses
import json

import jax
import numpy as np
import primer_study
import pytest
from primer_study import ALONE, MAIN, Cell, PrimerOptions, Prompts, Study, plan, rows_of, run

from jaxrag.base.errors import RequestError
from jaxrag.measure.evals.datasets.near import NearStudy
from jaxrag.measure.evals.datasets.options import NearOptions
from jaxrag.models.export import export_hf
from jaxrag.models.spec import init_params
from jaxrag.reuse.encode.chunks import encode_chunks

TWO = Prompts(2)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A file of 120 passages, the last of which is once more the first of its second half."""
    path = tmp_path_factory.mktemp("primers") / "oracle.jsonl"
    lines = [
        {
            "question": f"who keeps animal {n}", "answers": [f"Keeper {n}"],
            "ctxs": [{"title": f"Animal {n}", "text": f"It is kept by Keeper {n} in hut {n % 7}.",
                      "hasanswer": True, "isgold": True}],
        }
        for n in [*range(119), 60]
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture(scope="module")
def long_model_dir(tmp_path_factory, tiny_config, tokenizer_dir):
    """As ``model_dir``, with room for the texts that are shipped."""
    config = tiny_config(vocab_size=600, num_layers=2, max_positions=4096)
    directory = tmp_path_factory.mktemp("model") / "llama"
    export_hf(directory, init_params(config, jax.random.key(3)), config, tokenizer_dir)
    return str(directory)


@pytest.fixture(scope="module")
def options(data, long_model_dir):
    return PrimerOptions(
        long_model_dir, data, number=1, others=1, passages=2, counts=(3,), sizes=(40,),
        lengths=(16, 128), texts=2, template="plain",
    )  # fmt: skip


@pytest.fixture(scope="module")
def study(options):
    return Study(options)


def test_texts_are_of_passages_that_no_prompt_has(study, options):
    prompts = [study.asked(it, 0)[0].prompt for it in (TWO, Prompts(3), Prompts(2, 40))]
    assert [len(it.chunks) for it in prompts] == [2, 3, 2]
    seen = [study.tokenizer.decode(ids) for it in prompts for ids in it.chunks]
    texts = [study.tokenizer.decode(it) for it in study.texts["bare"]]
    [one, other] = [it.strip().split("\n\n") for it in texts]
    assert len(one) == len(other) == 2 and not {*one} & {*other}
    for text in (*one, *other):
        assert not any(text in chunk for chunk in seen)
        assert int(text.split()[5]) >= 59
    questions = study.tokenizer.decode(study.texts["questions"][0])
    assert questions.count("who keeps") == 20 == len({*questions.split("\n")} - {""})


def test_texts_have_the_lengths_that_they_are_called_by(study):
    cut, whole = study.texts["cut 16"][1], study.texts["whole 128"][1]
    assert len(cut) == 16 and np.array_equal(study.texts[MAIN][1][:16], cut)
    assert np.array_equal(study.texts[MAIN][1][: len(whole)], whole)
    assert study.tokenizer.decode(whole).count("It is kept by") == 1
    assert len(study.texts["prefix repeated"][0]) == 256
    assert not any(
        np.array_equal(*study.texts[kind]) for kind in ("dialogue", "code", "questions", "bare")
    )


def test_joined_passages_are_cut_to_just_so_many_tokens(study):
    short, long = (study.asked(it, 0)[0].prompt.chunks for it in (TWO, Prompts(2, 40)))
    for one, joined in zip(short, long, strict=True):
        text = study.tokenizer.decode(one).strip()
        assert text in study.tokenizer.decode(joined)
    around = len(study.template.chunk_ids(study.tokenizer, short[0][:0], "x"))
    assert {len(it) - around for it in long} == {40}  # the title is not shown


def test_kl_is_that_of_eval_near(study, options, data, long_model_dir):
    near = NearOptions("nq_open", (data,), model=long_model_dir, documents=2, template="plain",
                       methods=("full_reuse", "primed"))  # fmt: skip
    there = NearStudy.open(near, study.near.model)
    found = there.measure(study.items[2][0])["methods"]
    for primer, name in ((ALONE, "full_reuse"), ("bakery", "primed bakery")):
        line = study.measure(Cell(TWO, 0, primer, 0))
        assert line["kl"] == pytest.approx(np.mean(found[name]["kl"]), rel=1e-3, abs=1e-7)
        assert line["same"] == np.mean(found[name]["same"])
    assert not np.isclose(*(np.mean(it["kl"]) for it in found.values()), rtol=0.01)


@pytest.mark.parametrize("primer", ["before", "itself"])
def test_what_stands_before_a_chunk(study, monkeypatch, primer):
    prompt = study.asked(TWO, 0)[0].prompt
    kept, put = [], study.near.store.put

    def keep(key, kv, **said):
        kept.append(kv)
        return put(key, kv, **said)

    monkeypatch.setattr(study.near.store, "put", keep)
    line = study.measure(Cell(TWO, 0, primer, 1))
    assert len(kept) == 2
    for chunk in prompt.chunks:
        ids = study.texts[MAIN][1]
        text = study.template.prefix
        front = (
            [ids, study.tokenizer.encode(text)] if primer == "before" else [prompt.prefix, chunk]
        )
        if primer == "before":
            lead = prompt.prefix[: len(prompt.prefix) - len(front[1])]
            front = [lead, *front]
        [(_, kv)] = encode_chunks(study.near.model, "after_prefix", np.concatenate(front), [chunk])
        assert any(it.shape == kv.shape and np.allclose(it, kv, atol=1e-4) for it in kept)
    assert line["primer_tokens"] == (
        len(ids) if primer == "before" else np.mean([*map(len, prompt.chunks)])
    )


def test_rows_are_paired_by_prompt():
    def line(at, primer, text, kl):
        return Cell(TWO, at, primer, text), {"kl": kl, "same": 1 - kl, "primer_tokens": 10 * at}

    rows = rows_of([
        line(0, ALONE, 0, 0.4), line(0, MAIN, 0, 0.1), line(0, MAIN, 1, 0.3),
        line(1, ALONE, 0, 0.6), line(1, MAIN, 1, 0.2), line(1, "code", 1, 0.5),
    ])  # fmt: skip
    alone, main, code = rows
    assert [row["primer"] for row in rows] == [ALONE, MAIN, "code"]
    assert (main["prompts"], main["measured"], main["primer_tokens"]) == (2, 3, 5)
    assert main["kl"] == pytest.approx({"value": 0.2, "low": 0.2, "high": 0.2})
    assert main["kl_minus_none"] == pytest.approx({"value": -0.3, "low": -0.4, "high": -0.2})
    assert main["told_apart"] == pytest.approx(0.1)
    assert main["kl_over_none"]["value"] == pytest.approx(0.4)
    assert main["same_minus_none"]["value"] == pytest.approx(0.3)
    assert main["kl_over_none_of_texts"] == pytest.approx([0.1 / 0.4, 0.5 / 1.0])
    assert code["kl_minus_encyclopaedia"]["value"] == pytest.approx(0.3)
    assert code["kl_minus_none"]["value"] == pytest.approx(-0.1)
    assert alone["kl_minus_none"]["value"] == 0


def test_the_first_things_come_first(options):
    cells = list(plan(PrimerOptions("model", "data")))
    assert len(cells) == len({json.dumps(it) for it in cells})
    first = cells[: 24 * 12]
    assert {it.prompts for it in first} == {Prompts(5)} and {it.at for it in first} == {*range(24)}
    assert {it.text for it in first if it.primer == "dialogue"} == {*range(8)}
    for kind in primer_study.SEVERAL:
        pairs = [(it.at, it.text) for it in cells if (it.prompts, it.primer) == (Prompts(5), kind)]
        assert len(pairs) == len({*pairs}) == 24 * 8
    assert Prompts(20) in {it.prompts for it in cells} and Prompts(5, 512) in {
        it.prompts for it in cells
    }


def test_a_run_goes_on_where_it_ended(options, study, tmp_path, monkeypatch):
    monkeypatch.setattr(primer_study, "Study", lambda o: study)
    monkeypatch.setattr(primer_study, "SINGLE", (ALONE,))
    monkeypatch.setattr(primer_study, "SEVERAL", (MAIN, "bare"))
    small = dataclasses.replace(
        options, counts=(), lengths=(16,), texts=1, out=str(tmp_path / "it")
    )
    measured, own = [], study.measure

    def measure(cell):
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(cell)
        return own(cell)

    monkeypatch.setattr(study, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        run(small)
    early = run(dataclasses.replace(small, finished_only=True))
    assert [row["primer"] for row in early["rows"]] == [ALONE, MAIN, "bare"]
    monkeypatch.setattr(study, "measure", own)
    result = run(small)
    names = [row["primer"] for row in result["rows"]]
    assert names == [ALONE, MAIN, "bare", "cut 16", "before", ALONE, MAIN]
    assert result["rows"][:3] == early["rows"]
    assert result["rows"][-1]["chunk_tokens"] == 40 and result["machine"]["commit"]


def test_a_file_with_too_few_passages(options):
    with pytest.raises(RequestError, match=r"--texts 4: .*oracle.jsonl has enough for [23]$"):
        Study(dataclasses.replace(options, texts=4))
