"""Files of data sets: every one is read, its prompt is the authors', and a bad one is told so."""

import gzip
import json
import math
import random
import re
from pathlib import Path

import datasets
import pytest
from dataset_fixtures import CACHEBLEND, FIXTURES, HOTPOTQA, NQ, REAL, RGB, write
from refusal import refused

from jaxrag.base.errors import RequestError
from jaxrag.measure.evals.datasets.options import DATASET_NAMES, DatasetOptions
from jaxrag.measure.evals.datasets.records import records_of
from jaxrag.measure.evals.datasets.run import items_of
from jaxrag.measure.evals.datasets.table import DATASETS, dataset_named
from jaxrag.measure.evals.metrics import METRICS, squad_normalised
from jaxrag.models.text.prompts import template_named
from jaxrag.models.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir):
    return Tokenizer.load(tokenizer_dir)


@pytest.fixture
def data_dir(request):
    """The folder of the data sets' own files: --data-dir."""
    found = request.config.getoption("--data-dir")
    if found is None:
        pytest.skip("no --data-dir: name a folder with the data sets' own files")
    return found


def items(name, path, **options):
    return items_of(DatasetOptions(name, (str(path),), model="none", **options))


def prompt_of(name, item, tokenizer):
    """The text of the prompt, from the token ids that the engine gets."""
    template = DATASETS[name].template
    parts = [template.prefix_ids(tokenizer)]
    parts += [
        template.chunk_ids(tokenizer, tokenizer.encode(text), title)
        for title, text in item.documents
    ]
    parts.append(template.final_ids(tokenizer, item.question))
    return tokenizer.decode([int(i) for part in parts for i in part])


# The prompts once more, as whole texts and from the authors' records.

EN_SYSTEM = (
    "You are an accurate and reliable AI assistant that can answer questions with the help of "
    "external documents."
)
ZH_SYSTEM = "你是一个准确和可靠的人工智能助手"
LONGBENCH = json.loads(Path(__file__).with_name("dataset2prompt.json").read_text(encoding="utf-8"))


def rgb_text(record, noise, system, words):
    """As its ``processdata`` and ``predict`` do."""
    neg = math.ceil(5 * noise)
    pos = 5 - neg
    if noise == 1:
        neg, pos = 5, 0
    elif neg > len(record["negative"]):
        neg = len(record["negative"])
        pos = 5 - neg
    elif pos > len(record["positive"]):
        pos = len(record["positive"])
        neg = 5 - pos
    docs = record["positive"][:pos] + record["negative"][:neg]
    random.seed(2333)
    random.shuffle(docs)
    document, question = words
    joined = "\n".join(docs)
    return system + f"\n\n{document}\n{joined} \n\n{question}\n{record['query']}"


def nq_text(question, passages):
    shown = "\n".join(
        f"Document [{n + 1}](Title: {title}) {text}" for n, (title, text) in enumerate(passages)
    )
    return (
        "Write a high-quality answer for the given question using only the provided search results "
        f"(some of which might be irrelevant).\n\n{shown}\n\nQuestion: {question}\nAnswer:"
    )


def cacheblend_text(record):
    question = record["question"]
    question = question if question[-1] == "?" else question + "?"
    question = question[0].lower() + question[1:]
    texts = "".join(f"{one['title']}\n\n{one['text']}\n\n" for one in record["ctxs"])
    return (
        "You will be asked a question after reading several passages. Please directly answer the "
        "question based on the given passages. Do NOT repeat the question. The answer should be "
        f"within 5 words..\nPassages:\n{texts}\n\nAnswer the question directly based on the given "
        "passages. Do NOT repeat the question. The answer should be within 5 words. \n"
        f"Question:{question}\nAnswer:"
    )


def block_attention_text(passages, question):
    shown = "".join(f"- Title: {title}\n{text}\n" for title, text in passages)
    return (
        "You are an intelligent AI assistant. Please answer questions based on the user's "
        "instructions. Below are some reference documents that may help you in answering the "
        f"user's question.\n{shown}\n\nPlease write a high-quality answer for the given question "
        "using only the provided search documents (some of which might be irrelevant).\n"
        f"Question: {question}\n"
    )


def check_rgb(name, records, found, tokenizer):
    """The first paragraph is the system's, whose beginning is enough to know it by."""
    language = name[-2:]
    system = {"en": EN_SYSTEM, "zh": ZH_SYSTEM}[language]
    words = {"en": ("Document:", "Question:"), "zh": ("文档：", "问题：")}[language]
    for item in found:
        number, _, noise = item.id.partition("@")
        text = prompt_of(name, item, tokenizer)
        opening, _, _ = text.partition("\n\n")
        assert opening.startswith(system)
        assert text == rgb_text(records[int(number)], float(noise), opening, words)


@pytest.mark.parametrize("name", ["rgb_en", "rgb_zh"])
def test_rgb_prompts(name, tmp_path, tokenizer):
    found = items(name, write(name, tmp_path), noise=(0.0, 0.4, 0.8, 1.0))
    assert len(found) == 4 * len(RGB)
    assert found[0].answers == (("hills",), ("blue box", "box"))
    assert found[4].answers == (("mules",),)  # a question at every noise, then the next
    assert {len(item.documents) for item in found} == {5, 1}  # the last has one negative
    check_rgb(name, RGB, found, tokenizer)


def test_nq_open_prompts(tmp_path, tokenizer):
    path = write("nq_open", tmp_path)
    for item, record in zip(items("nq_open", path), NQ, strict=True):
        passages = [(one["title"], one["text"]) for one in record["ctxs"]]
        assert prompt_of("nq_open", item, tokenizer) == nq_text(record["question"], passages)


def test_nq_open_among_others(tmp_path, tokenizer):
    path = write("nq_open", tmp_path)
    found = items("nq_open", path, documents=4)
    assert found == items("nq_open", path, documents=4)
    places = set()
    for number, item in enumerate(found):
        place = int(re.fullmatch(r"gold at (\d) of 4", item.group)[1])
        places.add(place)
        gold = f"Document [{place}](Title: Animal {number}) It is kept by Keeper {number}."
        texts = [text for _, text in item.documents]
        assert texts[place - 1] == gold and len(set(texts)) == 4
        holders = [
            it for it in texts if squad_normalised(f"Keeper {number}") in squad_normalised(it)
        ]
        assert holders == [gold]
    assert len(places) > 1
    with refused(RequestError, "--passages 9"):
        items("nq_open", path, documents=9)


def test_nq_open_in_a_conversation(tmp_path, tokenizer):
    """The questions before are on passages of the prompt, which stay where they are."""
    path = write("nq_open", tmp_path)
    alone = items("nq_open", path, documents=4)
    for item, one in zip(items("nq_open", path, documents=4, earlier=2), alone, strict=True):
        assert item.documents == one.documents and item.answers == one.answers
        talk = item.talk
        assert talk.questions[-1] == one.question and len(set(talk.questions)) == 3
        texts = " ".join(text for _, text in item.documents)
        for question, answer in zip(talk.questions, talk.answers, strict=False):
            record = next(it for it in NQ if it["question"] == question)
            assert answer == record["answers"][0] and answer in texts
    for wrong in ({"documents": 4, "earlier": 4}, {"earlier": 1}, {"documents": 2, "earlier": -1}):
        with refused(RequestError, f"--earlier {wrong['earlier']}: of nq_open, fewer"):
            items("nq_open", path, **wrong)
    with refused(RequestError, "--earlier 1: of nq_open"):
        items("hotpotqa", path, documents=3, earlier=1)


def test_cacheblend_prompts(tmp_path, tokenizer):
    found = items("cacheblend_musique", write("cacheblend_musique", tmp_path))
    for item, record in zip(found, CACHEBLEND, strict=True):
        assert prompt_of("cacheblend_musique", item, tokenizer) == cacheblend_text(record)


@pytest.mark.parametrize("name", ["hotpotqa", "2wikimultihopqa", "musique"])
def test_paragraph_prompts(name, tmp_path, tokenizer):
    found = items(name, write(name, tmp_path))
    for item, record in zip(found, FIXTURES[name], strict=True):
        if name == "musique":
            passages = [(it["title"], it["paragraph_text"]) for it in record["paragraphs"]]
            assert item.answers == (("Kora Felell", "Kora"),)
        else:
            passages = [(title, "".join(parts)) for title, parts in record["context"]]
        text = block_attention_text(passages, record["question"])
        assert prompt_of(name, item, tokenizer) == text
    groups = [item.group for item in found]
    assert groups == (["2hop", "3hop1"] if name == "musique" else ["bridge", "comparison"])


@pytest.mark.parametrize("name", [name for name in DATASETS if name.startswith("longbench")])
def test_longbench_prompts(name, tmp_path, tokenizer):
    found = items(name, write(name, tmp_path))
    prompt = LONGBENCH[name.removeprefix("longbench_")]
    for item, record in zip(found, FIXTURES[name], strict=True):
        assert prompt_of(name, item, tokenizer) == prompt.format(**record)
    chunks = {"hotpotqa": 2, "2wikimqa": 2, "musique": 2, "passage_count": 3}
    chunks |= {"passage_retrieval_en": 3, "passage_retrieval_zh": 2}
    assert len(found[0].documents) == chunks.get(name.removeprefix("longbench_"), 1)


def test_longbench_e_has_steps(tmp_path):
    steps = [
        items(f"longbench_{name}", write(f"longbench_{name}", tmp_path))[0].group
        for name in ("hotpotqa", "2wikimqa", "musique")
    ]
    assert steps == ["0-4k words", "4-8k words", "8k+ words"]


@pytest.mark.parametrize("name", REAL)
def test_the_authors_own_file(name, data_dir, tokenizer):
    """Every record is read, and prompts are the authors' there too."""
    place, count = REAL[name]
    path = data_dir / place
    if not path.is_file():
        pytest.skip(f"--data-dir has no {place}")
    found = items(name, path)
    records = [record.values for record in records_of(str(path), {})]
    assert len(records) == count
    some = list(zip(found, records, strict=False))[:20]
    if name == "rgb_zh":
        assert len(found) == 6 * count
        check_rgb(name, records, found[:: count // 10], tokenizer)
        return
    assert len(found) == count
    for item, record in some:
        text = prompt_of(name, item, tokenizer)
        if name == "nq_open":
            passages = [(one["title"], one["text"]) for one in record["ctxs"]]
            assert text == nq_text(record["question"], passages)
        elif name == "cacheblend_musique":
            assert text == cacheblend_text(record)
        else:
            passages = [(title, text) for title, text in item.documents]
            assert text == block_attention_text(passages, record["question"])


@pytest.mark.parametrize("name", DATASETS)
def test_what_a_data_set_says_of_itself(name):
    spec = DATASETS[name]
    assert (spec.checked == "real file") == (name in REAL)
    assert set(spec.metrics) | set(spec.group_metrics.values()) <= METRICS.keys()
    assert spec.source and spec.title


def test_the_help_knows_every_name():
    assert tuple(DATASETS) == DATASET_NAMES
    with refused(RequestError, "'rgb'"):
        dataset_named("rgb")


@pytest.mark.parametrize("name", DATASETS)
def test_a_template_survives_its_file(name, tmp_path):
    path = tmp_path / f"{DATASETS[name].template.name}.toml"
    path.write_text(DATASETS[name].template.toml(), encoding="utf-8")
    assert template_named(str(path)) == DATASETS[name].template
    assert template_named(str(path)).digest == DATASETS[name].template.digest


@pytest.mark.parametrize("name", DATASETS)
def test_a_missing_field_is_named_with_its_line(name, tmp_path):
    spec = dataset_named(name)
    records = json.loads(json.dumps(FIXTURES[name]))
    field = list(spec.fields)[1]
    del records[1][field]
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    with refused(RequestError, field):
        items(name, path)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("rgb_en", {"positive": [["x"]]}, '"positive"'),
        ("rgb_en", {"answer": []}, '"answer"'),
        ("rgb_en", {"query": 3}, '"query"'),
        ("nq_open", {"ctxs": []}, '"ctxs"'),
        ("nq_open", {"ctxs": ["x"]}, '"ctxs"'),
        ("musique", {"paragraphs": [{}]}, ""),
        ("cacheblend_musique", {"answers": []}, '"answers"'),
        ("cacheblend_musique", {"ctxs": [{"title": ""}]}, ""),
        ("hotpotqa", {"context": [["x"]]}, ""),
        ("longbench_qasper", {"answers": [1]}, ""),
    ],
)
def test_a_field_of_another_form(name, change, said, tmp_path):
    record = {**json.loads(json.dumps(FIXTURES[name][0])), **change}
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(record), encoding="utf-8")
    with refused(RequestError, said):
        items(name, path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1}\n{"a"', "2"),
        ('[\n{"a": 1},\n\n{"a" 2}]', "4"),
        ('[{"a": 1},\n 5]', "2"),
        ("", ""),
        ("[]", ""),
    ],
)
def test_a_file_that_is_none(text, said, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(text, encoding="utf-8")
    with refused(RequestError, said):
        records_of(str(path), {})


def test_lines_of_a_list_are_counted(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps([{"a": 1}, {"a": [2, 3]}, {"a": 4}], indent=1), encoding="utf-8")
    assert [record.where for record in records_of(str(path), {})] == [
        f"{path}:{n}" for n in (2, 5, 11)
    ]


def test_other_kinds_of_files(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n'))
    assert records_of(str(path), {"a": (int,)})[0].values == {"a": 1}
    table = tmp_path / "x.parquet"
    flat = [{name: record[name] for name in ("_id", "question")} for record in HOTPOTQA]
    datasets.Dataset.from_list(flat).to_parquet(table)
    fields = {"_id": (str,), "question": (str,)}
    assert [record.values["_id"] for record in records_of(str(table), fields)] == ["5a0", "5a1"]
    (tmp_path / "bad.jsonl.gz").write_bytes(b"no gzip")
    (tmp_path / "bad.jsonl").write_bytes(b"\xff{}")
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    for name in ("bad.jsonl.gz", "bad.jsonl", "bad.parquet", "none.json"):
        with refused(RequestError, name):
            records_of(str(tmp_path / name), {})


def test_without_a_network_the_hub_is_one_line():
    with refused(RequestError) as found:
        records_of("hub:nobody/nothing", {})
    assert "\n" not in str(found.value)


def test_two_questions_with_one_id(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps([HOTPOTQA[0], HOTPOTQA[0]]), encoding="utf-8")
    with refused(RequestError, "'5a0'"):
        items("hotpotqa", path)
