"""LongBench and LongBench-E (Bai et al., arXiv:2308.14508): questions, retrieval and counting.

A context is cut where its passages begin, so that each is a chunk; put together they are the
context again, and the prompt is LongBench's. A task on one text has one chunk. LongBench takes the
middle out of prompts that are too long; here whole passages are left out instead.
"""

import itertools
import re
from collections.abc import Iterator

from jaxrag.measure.evals.datasets.records import DataRecord
from jaxrag.measure.evals.datasets.spec import DatasetItem, DatasetReading, DatasetSpec
from jaxrag.models.text.prompts import PromptTemplate

_FIELDS: dict[str, tuple[type, ...]] = {
    "input": (str,),
    "context": (str,),
    "answers": (list,),
    "length": (int,),
}
_STEPS = (4000, 8000)  # of LongBench-E, in words
_ONE_TEXT = r"(?!)"  # begins nowhere


def longbench_documents(context: str, begins: str) -> tuple[str, ...]:
    """A context cut in front of every place where the pattern matches; joined it is itself."""
    places = [0, *(found.start() for found in re.finditer(begins, context)), len(context)]
    cut = itertools.pairwise(places)
    return tuple(context[start:end] for start, end in cut if end > start)


def _items(records: list[DataRecord], begins: str, question: str) -> Iterator[DatasetItem]:
    for number, record in enumerate(records):
        values = record.values
        answers = values["answers"]
        if not answers or not all(isinstance(answer, str) for answer in answers):
            raise record.wrong("answers", "a list of texts, at least one")
        name = str(values.get("_id", number))
        yield DatasetItem(
            id=name,
            sample=name,
            question=question or values["input"],
            documents=tuple(("", it) for it in longbench_documents(values["context"], begins)),
            answers=(tuple(answers),),
            group=_words(values["length"]),
        )


def _words(length: int) -> str:
    """LongBench-E's steps."""
    short, long = _STEPS
    return "0-4k words" if length < short else "4-8k words" if length < long else "8k+ words"


def _spec(
    name: str, prompt: str, metric: str, tokens: int, begins: str = _ONE_TEXT, question: str = ""
) -> DatasetSpec:
    """``prompt`` has {context} and {input}; ``question`` is every record's, where it has none."""
    prefix, final = prompt.split("{context}")

    def items(records: list[DataRecord], reading: DatasetReading) -> Iterator[DatasetItem]:
        del reading
        return _items(records, begins, question)

    return DatasetSpec(
        title=f"LongBench {name}",
        source=f"github.com/THUDM/LongBench: data.zip, {name}.jsonl or {name}_e.jsonl",
        checked="fixture only",
        fields=_FIELDS,
        items=items,
        template=PromptTemplate(
            name=f"longbench_{name}",
            prefix=prefix,
            chunk="{text}",
            final=final.replace("{input}", "{question}"),
            chunk_order="document",
        ),
        metrics=(metric,),
        max_new_tokens=tokens,
        numbering="" if begins == _ONE_TEXT else begins,
        note="whole passages are left out of prompts that are too long, not their middle",
    )


_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output "
    "any other words.\n\nThe following are given passages.\n{context}\n\nAnswer the question based "
    "on the given passages. Only give me the answer and do not output any other words.\n\n"
    "Question: {input}\nAnswer:"
)
_PASSAGE = r"(?m)^Passage \d+:\n"
NARRATIVEQA = _spec(  # "asconcisely" is LongBench's
    "narrativeqa",
    "You are given a story, which can be either a novel or a movie script, and a question. Answer "
    "the question asconcisely as you can, using a single phrase if possible. Do not provide any "
    "explanation.\n\nStory: {context}\n\nNow, answer the question based on the story asconcisely "
    "as you can, using a single phrase if possible. Do not provide any explanation.\n\nQuestion: "
    "{input}\n\nAnswer:",
    "f1",
    128,
)
QASPER = _spec(
    "qasper",
    "You are given a scientific article and a question. Answer the question as concisely as you "
    "can, using a single phrase or sentence if possible. If the question cannot be answered based "
    'on the information in the article, write "unanswerable". If the question is a yes/no '
    'question, answer "yes", "no", or "unanswerable". Do not provide any explanation.\n\nArticle: '
    "{context}\n\n Answer the question based on the above article as concisely as you can, using a "
    "single phrase or sentence if possible. If the question cannot be answered based on the "
    'information in the article, write "unanswerable". If the question is a yes/no question, '
    'answer "yes", "no", or "unanswerable". Do not provide any explanation.\n\nQuestion: '
    "{input}\n\nAnswer:",
    "f1",
    128,
)
MULTIFIELDQA_EN = _spec(
    "multifieldqa_en",
    "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following "
    "question based on the above text, only give me the answer and do not output any other words."
    "\n\nQuestion: {input}\nAnswer:",
    "f1",
    64,
)
MULTIFIELDQA_ZH = _spec(
    "multifieldqa_zh",
    "阅读以下文字并用中文简短回答：\n\n{context}\n\n现在请基于上面的文章回答下面的问题，只告诉我答案，"
    "不要输出任何其他字词。\n\n问题：{input}\n回答：",
    "f1_zh",
    64,
)
LONGBENCH_HOTPOTQA = _spec("hotpotqa", _PASSAGES, "f1", 32, _PASSAGE)
LONGBENCH_2WIKIMQA = _spec("2wikimqa", _PASSAGES, "f1", 32, _PASSAGE)
LONGBENCH_MUSIQUE = _spec("musique", _PASSAGES, "f1", 32, _PASSAGE)
PASSAGE_COUNT = _spec(
    "passage_count",
    "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. "
    "Please carefully read these paragraphs and determine how many unique paragraphs there are "
    "after removing duplicates. In other words, how many non-repeating paragraphs are there in "
    "total?\n\n{context}\n\n{input}",
    "numbers",
    32,
    r"(?m)^Paragraph \d+: ",
    "Please enter the final count of unique paragraphs after removing duplicates. The output "
    "format should only contain the number, such as 1, 2, 3, and so on.\n\nThe final answer is: ",
)
PASSAGE_RETRIEVAL_EN = _spec(
    "passage_retrieval_en",
    "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which "
    "paragraph the abstract is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\n"
    "Please enter the number of the paragraph that the abstract is from. The answer format must be "
    'like "Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: ',
    "numbers",
    32,
    r"(?m)^Paragraph \d+: ",
)
PASSAGE_RETRIEVAL_ZH = _spec(
    "passage_retrieval_zh",
    "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n下面是一个摘要"
    '\n\n{input}\n\n请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"等格式\n\n答案是：',
    "numbers",
    32,
    r"(?m)^段落\d+[：:]",
)
