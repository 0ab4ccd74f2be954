"""HotpotQA (Yang et al. 2018), the distractor setting; 2WikiMultihopQA has the same form."""

from collections.abc import Iterator
from typing import Any

from jaxrag.measure.evals.datasets.records import DataRecord
from jaxrag.measure.evals.datasets.spec import DatasetItem, DatasetReading, DatasetSpec
from jaxrag.models.text.prompts import TEMPLATES

FIELDS: dict[str, tuple[type, ...]] = {
    "_id": (str,),
    "question": (str,),
    "answer": (str,),
    "context": (list,),
}


def paragraph_items(records: list[DataRecord], reading: DatasetReading) -> Iterator[DatasetItem]:
    """Questions over paragraphs of a title and its sentences, by the type of the question."""
    del reading
    for record in records:
        values = record.values
        yield DatasetItem(
            id=values["_id"],
            sample=values["_id"],
            question=values["question"],
            documents=tuple(_paragraph(record, one) for one in values["context"]),
            answers=((values["answer"],),),
            group=str(values.get("type", "")),
        )


def _paragraph(record: DataRecord, one: Any) -> tuple[str, str]:
    match one:
        case [str(title), [*sentences]] if all(isinstance(it, str) for it in sentences):
            return title, "".join(sentences)
    raise record.wrong("context", "a list of pairs of a title and its sentences")


HOTPOTQA = DatasetSpec(
    title="HotpotQA, distractor setting",
    source="hotpotqa.github.io: hotpot_dev_distractor_v1.json",
    checked="real file",
    fields=FIELDS,
    items=paragraph_items,
    template=TEMPLATES["block_attention"],
    metrics=("f1_hotpotqa", "exact_match", "subspan"),
    max_new_tokens=32,
    note="checked on 100 questions of the training part; the prompt is Block-Attention's",
)
