"""Questions over several paragraphs, in their authors' forms: HotpotQA, 2WikiMultihopQA, MuSiQue.

HotpotQA is Yang et al. 2018, 2WikiMultihopQA Ho et al. 2020, MuSiQue Trivedi et al. 2022. The
prompts are Block-Attention's.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxrag.measure.evals.datasets.records import DataRecord
from jaxrag.measure.evals.datasets.spec import DatasetItem, DatasetReading, DatasetSpec
from jaxrag.models.text.prompts import TEMPLATES


def _hotpotqa_items(records: list[DataRecord], reading: DatasetReading) -> Iterator[DatasetItem]:
    """Paragraphs of a title and its sentences; groups are types of questions."""
    del reading
    for record in records:
        values = record.values
        documents = tuple(_sentences(record, one) for one in values["context"])
        yield _item(record, "_id", documents, (values["answer"],), str(values.get("type", "")))


def _musique_items(records: list[DataRecord], reading: DatasetReading) -> Iterator[DatasetItem]:
    """Paragraphs of a title and a text; groups are 2hop, 3hop1, ..., from the ids."""
    del reading
    for record in records:
        values = record.values
        documents = tuple(_paragraph(record, paragraph) for paragraph in values["paragraphs"])
        answers = (values["answer"], *values.get("answer_aliases", ()))
        yield _item(record, "id", documents, answers, values["id"].partition("_")[0])


def _item(
    record: DataRecord,
    id_field: str,
    documents: tuple[tuple[str, str], ...],
    answers: tuple[str, ...],
    group: str,
) -> DatasetItem:
    name = record.values[id_field]
    return DatasetItem(
        id=name,
        sample=name,
        question=record.values["question"],
        documents=documents,
        answers=(answers,),
        group=group,
    )


def _sentences(record: DataRecord, one: Any) -> tuple[str, str]:
    match one:
        case [str(title), [*sentences]] if all(isinstance(it, str) for it in sentences):
            return title, "".join(sentences)
    raise record.wrong("context", "a list of pairs of a title and its sentences")


def _paragraph(record: DataRecord, one: Any) -> tuple[str, str]:
    match one:
        case {"title": str(title), "paragraph_text": str(text)}:
            return title, text
    raise record.wrong("paragraphs", "a list of objects with a title and a paragraph_text")


HOTPOTQA = DatasetSpec(
    title="HotpotQA, distractor setting",
    source="hotpotqa.github.io: hotpot_dev_distractor_v1.json",
    checked="real file",
    fields={"_id": (str,), "question": (str,), "answer": (str,), "context": (list,)},
    items=_hotpotqa_items,
    template=TEMPLATES["block_attention"],
    metrics=("f1_hotpotqa", "exact_match", "subspan"),
    max_new_tokens=32,
    note="checked on 100 questions of the training part; the prompt is Block-Attention's",
)
TWO_WIKI = dataclasses.replace(
    HOTPOTQA,
    title="2WikiMultihopQA",
    source="github.com/Alab-NII/2wikimultihop: dev.json",
    checked="fixture only",
    note="the prompt is Block-Attention's",
)
MUSIQUE = dataclasses.replace(
    HOTPOTQA,
    title="MuSiQue",
    source="github.com/StonyBrookNLP/musique: musique_ans_v1.0_dev.jsonl",
    fields={"id": (str,), "question": (str,), "paragraphs": (list,), "answer": (str,)},
    items=_musique_items,
    metrics=("f1_musique", "exact_match", "subspan"),
)
