"""RGB (Chen et al., arXiv:2309.01431): five documents, a share of them without the answer.

As its ``evalue.py`` draws them: ceil(5 x noise) negatives, the first of the file, beside the first
positives; where one kind runs short, as many more of the other; all shuffled by
``random.seed(2333)``, set again for every question, so that prompts of equally many documents have
the same order. At noise 1 there is nothing to find, and a refusal counts as right.
"""

import math
import random
from collections.abc import Iterator
from typing import Any

from jaxrag.measure.evals.datasets.records import DataRecord
from jaxrag.measure.evals.datasets.spec import DatasetItem, DatasetReading, DatasetSpec
from jaxrag.measure.evals.metrics import AnswerParts
from jaxrag.models.text.prompts import PromptTemplate

DOCUMENTS = 5
NOISE = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_SEED = 2333
_FIELDS: dict[str, tuple[type, ...]] = {
    "id": (int, str),
    "query": (str,),
    "answer": (str, list),
    "positive": (list,),
    "negative": (list,),
}
_SYSTEM = {
    "en": (
        "You are an accurate and reliable AI assistant that can answer questions with the help of "
        "external documents. Please note that external documents may contain noisy or factually "
        "incorrect information. If the information in the document contains the correct answer, "
        "you will give an accurate answer. If the information in the document does not contain the "
        "answer, you will generate \u2019I can not answer the question because of the insufficient "
        "information in documents.\u2018. If there are inconsistencies with the facts in some of "
        "the documents, please generate the response 'There are factual errors in the provided "
        "documents.' and provide the correct answer."
    ),
    "zh": (
        "你是一个准确和可靠的人工智能助手，能够借助外部文档回答问题，请注意外部文档可能存在噪声事实性错误。"
        "如果文档中的信息包含了正确答案，你将进行准确的回答。如果文档中的信息不包含答案，你将生成“文档信息"
        "不足，因此我无法基于提供的文档回答该问题。”。如果部分文档中存在与事实不一致的错误，请先生成“提供"
        "文档的文档存在事实性错误。”，并生成正确答案。"
    ),
}
_WORDS = {"en": ("Document", "Question", ":"), "zh": ("文档", "问题", "：")}


def rgb_template(language: str) -> PromptTemplate:
    """Documents joined by line ends; the system's text is the first paragraph."""
    document, question, colon = _WORDS[language]
    return PromptTemplate(
        name=f"rgb_{language}",
        prefix=f"{_SYSTEM[language]}\n\n{document}{colon}",
        chunk="\n{text}",
        final=f" \n\n{question}{colon}\n{{question}}",
        chunk_order="document",
    )


def rgb_documents(positive: list[str], negative: list[str], noise: float) -> list[str]:
    """The documents of a question, in the order of its prompt."""
    negatives = math.ceil(DOCUMENTS * noise)
    positives = DOCUMENTS - negatives
    if noise == 1:
        negatives, positives = DOCUMENTS, 0
    elif negatives > len(negative):
        negatives = len(negative)
        positives = DOCUMENTS - negatives
    elif positives > len(positive):
        positives = len(positive)
        negatives = DOCUMENTS - positives
    found = positive[:positives] + negative[:negatives]
    random.Random(_SEED).shuffle(found)
    return found


def _items(records: list[DataRecord], reading: DatasetReading) -> Iterator[DatasetItem]:
    for number, record in enumerate(records):
        values = record.values
        positive, negative = (_texts(record, name) for name in ("positive", "negative"))
        for noise in reading.noise or NOISE:
            yield DatasetItem(
                id=f"{number}@{noise:g}",
                sample=str(number),
                question=values["query"],
                documents=tuple(("", text) for text in rgb_documents(positive, negative, noise)),
                answers=_parts(record),
                group=f"noise {noise:g}",
            )


def _texts(record: DataRecord, name: str) -> list[str]:
    found: Any = record.values[name]
    if not all(isinstance(text, str) for text in found):
        raise record.wrong(
            name, "a list of texts; files of counterfactual or joined evidence differ"
        )
    return list(found)


def _parts(record: DataRecord) -> AnswerParts:
    """A text, or a list: every entry is needed; a list in it is what the entry may be called."""
    given = record.values["answer"]
    parts = [one if isinstance(one, list) else [one] for one in _listed(given)]
    if not parts or not all(part and all(isinstance(it, str) for it in part) for part in parts):
        raise record.wrong("answer", "a text, or a list of texts or of lists of texts")
    return tuple(tuple(part) for part in parts)


def _listed(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [given]


def _spec(language: str, checked: Any, note: str) -> DatasetSpec:
    return DatasetSpec(
        title=f"RGB, {'English' if language == 'en' else 'Chinese'}",
        source=f"github.com/chen700564/RGB: data/{language}_refine.json",
        checked=checked,
        fields=_FIELDS,
        items=_items,
        template=rgb_template(language),
        metrics=("rgb", "refuses"),
        max_new_tokens=64,
        cleaned=(lambda answer: answer.replace(" ", "")) if language == "zh" else str,
        group_metrics={"noise 1": "rgb_noise"},
        note=note,
    )


RGB_EN = _spec("en", "fixture only", "")
RGB_ZH = _spec("zh", "real file", "")
