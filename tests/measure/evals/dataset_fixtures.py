"""Small files in the forms of the data sets' authors; all texts are made up."""

import json

RGB = [
    {
        "id": 0, "query": "Where does tea grow?", "answer": ["hills", ["blue box", "box"]],
        "positive": [f"Tea grows on hills {n}." for n in range(6)],
        "negative": [f"Salt is white {n}." for n in range(6)], "fakeanswer": "sea",
    },
    {
        "id": 1, "query": "Who carries salt?", "answer": "mules",
        "positive": ["Mules carry salt."], "negative": [f"Oak burns {n}." for n in range(6)],
    },
    {
        "id": 2, "query": "What burns?", "answer": [["oak", "larch"]],
        "positive": [f"Oak burns {n}." for n in range(6)], "negative": ["Tea grows."],
    },
]  # fmt: skip
NQ = [
    {
        "question": f"who keeps animal {n}", "answers": [f"Keeper {n}"],
        "ctxs": [
            {"title": f"Animal {n}", "text": f"It is kept by Keeper {n}.", "hasanswer": True,
             "isgold": True}
        ],
        "nq_annotated_gold": {},
    }
    for n in range(8)
]  # fmt: skip
MUSIQUE = [
    {
        "id": f"{hops}__1_{hops}", "question": f"Who lives there, {hops}?", "answer": "Kora Felell",
        "answer_aliases": ["Kora"], "answerable": True, "question_decomposition": [],
        "paragraphs": [
            {"idx": n, "title": f"Title {n}", "paragraph_text": f"Text {n}.",
             "is_supporting": n < 2}
            for n in range(4)
        ],
    }
    for hops in ("2hop", "3hop1")
]  # fmt: skip
CACHEBLEND = [
    {
        "ctxs": [{"title": "", "text": f"passage {n} ."} for n in range(3)],
        "question": question, "answers": ["Exeter College"],
    }
    for question in ("Where was She educated", "Who is it?")
]  # fmt: skip
HOTPOTQA = [
    {
        "_id": f"5a{n}", "question": "Are both in one country?", "answer": "yes", "type": kind,
        "level": "hard", "supporting_facts": [["First", 0]],
        "context": [["First", ["It is one.", " It is two."]], ["Second", ["It is three."]]],
    }
    for n, kind in enumerate(("bridge", "comparison"))
]  # fmt: skip
PASSAGES = "Passage 1:\nTea\nIt grows.\n\nPassage 2:\nSalt\nIt is carried, as Passage 1: says.\n"
PARAGRAPHS = "Paragraph 1: Tea grows.\n\nParagraph 2: Salt is carried.\n\nParagraph 3: Oak burns."
ZH_PARAGRAPHS = "段落1：茶。\n\n段落2：盐。"


def longbench(context, question, answers, length=100):
    return [{
        "input": question, "context": context, "answers": answers, "length": length,
        "dataset": "x", "language": "en", "all_classes": None, "_id": f"id{n}",
    } for n in range(2)]  # fmt: skip


LONGBENCH = {
    "longbench_narrativeqa": longbench("A story.\nIt ends.", "Who?", ["Kora"]),
    "longbench_qasper": longbench("An article.", "Why?", ["unanswerable"]),
    "longbench_multifieldqa_en": longbench("A text.", "What?", ["tea"]),
    "longbench_multifieldqa_zh": longbench("一段文字。", "什么？", ["茶"]),
    "longbench_hotpotqa": longbench(PASSAGES, "What grows?", ["tea"], 3999),
    "longbench_2wikimqa": longbench(PASSAGES, "What grows?", ["tea"], 4000),
    "longbench_musique": longbench(PASSAGES, "What grows?", ["tea"], 8000),
    "longbench_passage_count": longbench(PARAGRAPHS, "", ["3"]),
    "longbench_passage_retrieval_en": longbench(PARAGRAPHS, "It is on salt.", ["Paragraph 2"]),
    "longbench_passage_retrieval_zh": longbench(ZH_PARAGRAPHS, "说盐。", ["段落2"]),
}
FIXTURES = {
    "rgb_en": RGB,
    "rgb_zh": RGB,
    "nq_open": NQ,
    "musique": MUSIQUE,
    "cacheblend_musique": CACHEBLEND,
    "hotpotqa": HOTPOTQA,
    "2wikimultihopqa": HOTPOTQA,
    **LONGBENCH,
}
# Where the authors' own file lies below --data-dir.
REAL = {
    "rgb_zh": ("rgb/zh_refine.json", 300),
    "nq_open": ("nq-open/nq-open-oracle.jsonl", 2655),
    "musique": ("hippo-multihop/musique_train.json", 100),
    "cacheblend_musique": ("cacheblend-musique/musique_s.json", 150),
    "hotpotqa": ("hippo-multihop/hotpotqa_train.json", 100),
}


def write(name, folder):
    """The fixture of a data set as its authors write it: lines, or one list."""
    records = FIXTURES[name]
    path = folder / f"{name}.json"
    if name in ("cacheblend_musique", "hotpotqa", "2wikimultihopqa"):
        text = json.dumps(records, indent=1, ensure_ascii=False)
    else:
        text = "".join(json.dumps(it, ensure_ascii=False) + "\n" for it in records)
    path.write_text(text, encoding="utf-8")
    return path
