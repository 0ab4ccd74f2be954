"""What stacks write around the passages that they paste, in words of our own.

``STACKS`` are those that the rules of configs/passages were made for. The others are modelled on
prompts of public projects: ``HELD_OUT`` on ten that no rule was made with; ``HELD_OUT_LATER`` on
five more, written down before the rules were changed for what the ten had shown; ``HELD_OUT_LAST``
on four, written down after that; ``HELD_OUT_NEWEST`` on ten, written down before the rules were
changed for what those four had shown; ``HELD_OUT_UNSEEN`` on five, for which no rule was changed.
Each takes passages [(name, text)] and a question, and gives the messages of a chat.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

Passages = Sequence[tuple[str, str]]
Messages = list[dict[str, str]]
Stack = Callable[[Passages, str], Messages]

_TOLD = (
    "You answer questions from what was found. Say what it says, and where it says nothing, say "
    "so. Keep to three sentences."
)


def _chat(user: str, system: str = "") -> Messages:
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": user}]


def _langchain(passages: Passages, question: str) -> Messages:
    return _chat(question, _TOLD + "\n\n" + "\n\n".join(text for _, text in passages))


def _llamaindex(passages: Passages, question: str) -> Messages:
    found = "\n\n".join(f"file_path: docs/{name}\n\n{text}" for name, text in passages)
    line = "-" * 21
    return _chat(
        f"Context information is below.\n{line}\n{found}\n{line}\n{_TOLD}\nQuery: {question}\n"
        "Answer: ",
        _TOLD,
    )


def _haystack(passages: Passages, question: str) -> Messages:
    found = "".join(f"\n    {text}\n" for _, text in passages)
    return _chat(f"{_TOLD}\n\nContext:\n{found}\nQuestion: {question}\nAnswer:")


def _open_webui(passages: Passages, question: str) -> Messages:
    found = "\n".join(
        f'<source id="{number}" name="{name}">{text}</source>'
        for number, (name, text) in enumerate(passages, 1)
    )
    return _chat(
        f"### Task:\n{_TOLD}\n\n<context>\n{found}\n</context>\n\n<user_query>\n{question}\n"
        "</user_query>\n"
    )


def _ragflow(passages: Passages, question: str) -> Messages:
    found = "\n".join(
        f"\nID: {number}\n├── Title: {name}\n└── Content:\n{text}"
        for number, (name, text) in enumerate(passages)
    )
    return _chat(question, f"{_TOLD}\nHere is the knowledge base:\n{found}\nThat was it.")


def _anythingllm(passages: Passages, question: str) -> Messages:
    found = "".join(
        f"[CONTEXT {number}]:\n{text}\n[END CONTEXT {number}]\n\n"
        for number, (_, text) in enumerate(passages)
    )
    return _chat(question, f"{_TOLD}\nContext:\n    {found}")


STACKS: dict[str, Stack] = {
    "LangChain, stuff": _langchain,
    "LlamaIndex, compact": _llamaindex,
    "Haystack, PromptBuilder": _haystack,
    "Open WebUI": _open_webui,
    "RAGFlow": _ragflow,
    "AnythingLLM": _anythingllm,
}


def _dify(passages: Passages, question: str) -> Messages:
    found = "\n".join(text for _, text in passages)
    return _chat(
        question,
        "Use the following context as what you have learned, inside <context></context> XML "
        f"tags.\n\n<context>\n{found}\n</context>\n\n{_TOLD}",
    )


def _flowise(passages: Passages, question: str) -> Messages:
    found = "\n\n".join(text for _, text in passages)
    return _chat(f"{_TOLD}\n\n------------\n{found}\n------------\nREMEMBER: {_TOLD}\n\n{question}")


def _private_gpt(passages: Passages, question: str) -> Messages:
    found = "\n\n".join(f"file_name: {name}\n\n{text}" for name, text in passages)
    return _chat(
        question,
        f"{_TOLD}\nContext information is provided below.\n{'-' * 20}\n{found}\n{'-' * 20}",
    )


def _onyx(passages: Passages, question: str) -> Messages:
    found = "\n\n\n".join(
        f"DOCUMENT {number}: {name}\nSource: Web\n```\n{text}\n```"
        for number, (name, text) in enumerate(passages, 1)
    )
    return _chat(f"{_TOLD}\n\nCONTEXT:\n{'=' * 10}\n{found}\n{'=' * 10}\n\nQUERY: {question}")


def _verba(passages: Passages, question: str) -> Messages:
    found = "\n\n".join(
        f"Document Title: {name}\nHigh Relevancy: True\nContext: {text}" for name, text in passages
    )
    return _chat(f"Answer this query: '{question}' with this provided context: {found}", _TOLD)


def _khoj(passages: Passages, question: str) -> Messages:
    found = "\n\n".join(f"# File: {name}\n## Entry\n{text}" for name, text in passages)
    return [
        {"role": "system", "content": _TOLD},
        {"role": "user", "content": f"# User's Notes:\n-----\n{found}"},
        {"role": "assistant", "content": "Understood."},
        {"role": "user", "content": question},
    ]


def _librechat(passages: Passages, question: str) -> Messages:
    found = "".join(
        f"\n        <file>\n          <filename>{name}</filename>\n          <context>\n"
        f"            <![CDATA[{text}]]>\n          </context>\n        </file>"
        for name, text in passages
    )
    return _chat(question, f"{_TOLD}\n      <files>{found}\n      </files>")


def _cheshire_cat(passages: Passages, question: str) -> Messages:
    found = "".join(f"  - {text} (extracted from {name})\n" for name, text in passages)
    return _chat(question, f"{_TOLD}\n\n# Context\n\n## Context of documents: \n{found}")


def _r2r(passages: Passages, question: str) -> Messages:
    found = "\n".join(
        f"Source ID [{number:07x}]:\nText: {text}\n" for number, (_, text) in enumerate(passages)
    )
    return _chat(
        f"## Task:\n\n{_TOLD}\n\n### Query:\n{question}\n\n### Context:\n{found}\n\n## Response:"
    )


def _gpt4all(passages: Passages, question: str) -> Messages:
    found = "".join(
        f"Collection: mine\nPath: {name}\nExcerpt: {text}\n\n" for name, text in passages
    )
    return _chat(f"### Context:\n{found}{question}")


HELD_OUT: dict[str, Stack] = {
    "Dify": _dify,
    "Flowise": _flowise,
    "PrivateGPT": _private_gpt,
    "Onyx": _onyx,
    "Verba": _verba,
    "Khoj": _khoj,
    "LibreChat": _librechat,
    "Cheshire Cat": _cheshire_cat,
    "R2R": _r2r,
    "GPT4All": _gpt4all,
}


def _quivr(passages: Passages, question: str) -> Messages:
    found = "\n\n".join(
        f"Filename: {name}\nSource: {number} \n {text}"
        for number, (name, text) in enumerate(passages)
    )
    return _chat(f"Original task: {question}\n", f"{_TOLD}\n- Context:\n{found}\n")


def _perplexica(passages: Passages, question: str) -> Messages:
    found = "\n".join(f"{number}. {name} {text}" for number, (name, text) in enumerate(passages, 1))
    return _chat(
        question, f"{_TOLD}\n\n    <context>\n    {found}\n    </context>\n\n    Be brief."
    )


def _kotaemon(passages: Passages, question: str) -> Messages:
    found = "".join(f"<br><b>Content from {name}: </b> {text} \n<br>\n" for name, text in passages)
    return _chat(f"{_TOLD}\n\nContext:\n{found}\nQuestion: {question}\nHelpful Answer:")


def _lightrag(passages: Passages, question: str) -> Messages:
    found = "\n".join(
        json.dumps({"reference_id": str(number), "content": text}, ensure_ascii=False)
        for number, (_, text) in enumerate(passages, 1)
    )
    return _chat(
        question, f"---Role---\n\n{_TOLD}\n\n---Context---\n\nChunks:\n\n```json\n{found}\n```\n"
    )


def _continue(passages: Passages, question: str) -> Messages:
    found = "\n\n".join(f"```{name} (1-40)\n{text}\n```" for name, text in passages)
    return _chat(f"Use the above code to answer.\n\n{found}\n\n{question}", _TOLD)


HELD_OUT_LATER: dict[str, Stack] = {
    "Quivr": _quivr,
    "Perplexica": _perplexica,
    "Kotaemon": _kotaemon,
    "LightRAG": _lightrag,
    "Continue": _continue,
}


def _fastgpt(passages: Passages, question: str) -> Messages:
    found = "\n------\n".join(
        json.dumps(
            {"id": f"{number:024x}", "sourceName": name, "content": text}, ensure_ascii=False
        )
        for number, (name, text) in enumerate(passages, 1)
    )
    return _chat(question, f"{_TOLD}\n\n<Cites>\n{found}\n</Cites>\n")


def _h2ogpt(passages: Passages, question: str) -> Messages:
    found = "\n\n".join(text for _, text in passages)
    return _chat(f'{_TOLD}\n"""\n{found}\n"""\nAccording to only what is above,\n{question}')


def _txtai(passages: Passages, question: str) -> Messages:
    found = "\n".join(text for _, text in passages)
    return _chat(f"{_TOLD}\n\nquestion: {question}\ncontext: {found}")


def _kilo(passages: Passages, question: str) -> Messages:
    found = "\n\n".join(
        f"[[ {name} | part {number} of {len(passages)} ]]\n{text}"
        for number, (name, text) in enumerate(passages, 1)
    )
    return _chat(f"{found}\n\n{question}", _TOLD)


HELD_OUT_LAST: dict[str, Stack] = {
    "FastGPT": _fastgpt,
    "h2oGPT": _h2ogpt,
    "txtai": _txtai,
    "of our own, double brackets": _kilo,
}


def _langchain4j(passages: Passages, question: str) -> Messages:
    found = "\n\n".join(text for _, text in passages)
    return _chat(f"{question}\n\nAnswer using the following information:\n{found}")


def _spring_ai(passages: Passages, question: str) -> Messages:
    found = "\n".join(text for _, text in passages)
    line = "-" * 21
    return _chat(
        f"{question}\n\nContext information is below, surrounded by {line}\n\n{line}\n{found}\n"
        f"{line}\n\n{_TOLD}\n"
    )


def _kernel_memory(passages: Passages, question: str) -> Messages:
    found = "".join(
        f"==== [File:{name};Relevance:{90 - number}.{number}%]:\n{text}\n"
        for number, (name, text) in enumerate(passages)
    )
    return _chat(f"Facts:\n{found}\n======\n{_TOLD}\nQuestion: {question}\nAnswer: ")


def _dspy(passages: Passages, question: str) -> Messages:
    found = "\n".join(f"[{number}] «{text}»" for number, (_, text) in enumerate(passages, 1))
    return _chat(
        f"[[ ## context ## ]]\n{found}\n\n[[ ## question ## ]]\n{question}\n\nRespond with the "
        "fields, starting with the field `[[ ## answer ## ]]`.",
        _TOLD,
    )


def _embedchain(passages: Passages, question: str) -> Messages:
    found = " | ".join(text for _, text in passages)
    return _chat(
        f"{_TOLD}\n\nContext information:\n{'-' * 22}\n{found}\n{'-' * 22}\n\n"
        f"Query: {question}\nAnswer:"
    )


def _langflow(passages: Passages, question: str) -> Messages:
    found = "\n".join(text for _, text in passages)
    return _chat(f"{found}\n\n---\n\n{_TOLD}\n\nQuestion: {question}\n\nAnswer: ")


def _lobechat(passages: Passages, question: str) -> Messages:
    found = "\n".join(
        f'<chunk fileId="file_{number:08x}" fileName="{name}" similarity="0.{60 - number}" >{text}'
        "</chunk>"
        for number, (name, text) in enumerate(passages)
    )
    return _chat(
        f"{question}\n\n<knowledge_base_qa_info>\n{_TOLD}\n<retrieved_chunks>\n{found}\n"
        f"</retrieved_chunks>\n<user_query>\n<raw_query>{question}</raw_query>\n</user_query>\n"
        "</knowledge_base_qa_info>"
    )


def _azure_search(passages: Passages, question: str) -> Messages:
    found = "\n".join(
        f"{name}#page={number}: {text}" for number, (name, text) in enumerate(passages)
    )
    return _chat(f"{question}\n\nSources:\n{found}\n", _TOLD)


def _maxkb(passages: Passages, question: str) -> Messages:
    found = "\n".join(f"<data>{name}:{text}</data>" for name, text in passages)
    return _chat(f"What is known:\n{found}\nHow to answer:\n{_TOLD}\nThe question:\n{question}\n")


def _autogen(passages: Passages, question: str) -> Messages:
    found = "".join(f"{text}\n" for _, text in passages)
    return _chat(f"{_TOLD}\n\nThe user's question is: {question}\n\nContext is: {found}\n")


HELD_OUT_NEWEST: dict[str, Stack] = {
    "LangChain4j": _langchain4j,
    "Spring AI": _spring_ai,
    "Kernel Memory": _kernel_memory,
    "DSPy": _dspy,
    "Embedchain": _embedchain,
    "Langflow": _langflow,
    "LobeChat": _lobechat,
    "Azure Search demo": _azure_search,
    "MaxKB": _maxkb,
    "AutoGen": _autogen,
}


def _semantic_kernel(passages: Passages, question: str) -> Messages:
    found = "".join(
        f"  \n    Name: {name}\n    Value: {text}\n    Link: https://example.org/{name}\n"
        "    -----------------\n"
        for name, text in passages
    )
    return _chat(f"{found}  \n\n{question}\n\n{_TOLD}\n")


def _vercel(passages: Passages, question: str) -> Messages:
    found = json.dumps(
        [{"name": text, "similarity": 0.9 - at / 50} for at, (_, text) in enumerate(passages)],
        ensure_ascii=False,
    )
    return [
        {"role": "system", "content": _TOLD},
        {"role": "user", "content": question},
        {"role": "user", "content": found},
    ]


def _cohere(passages: Passages, question: str) -> Messages:
    found = "\n\n".join(
        f"Document: {number}\ntitle: {name}\nsnippet: {text}"
        for number, (name, text) in enumerate(passages)
    )
    return _chat(question, f"{_TOLD}\n\n<results>\n{found}\n</results>")


def _citations(passages: Passages, question: str) -> Messages:
    found = "".join(f"Source {at}:\n{text}\n-----\n" for at, (_, text) in enumerate(passages, 1))
    return _chat(
        f"{_TOLD}\nBelow are several numbered sources of information:\n------\n{found}------\n"
        f"Query: {question}\nAnswer: "
    )


def _nvidia(passages: Passages, question: str) -> Messages:
    found = "\n\n".join(f"File: {name}\nContent: {text}" for name, text in passages)
    return [
        {"role": "system", "content": _TOLD},
        {"role": "user", "content": f"Context: {found}\n\nQuestion: {question}\n\nAnswer:"},
    ]


HELD_OUT_UNSEEN: dict[str, Stack] = {
    "Semantic Kernel": _semantic_kernel,
    "Vercel AI SDK": _vercel,
    "Cohere": _cohere,
    "LlamaIndex, citations": _citations,
    "NVIDIA's blueprint": _nvidia,
}


def by_characters(text: str, size: int = 1000, overlap: int = 200) -> list[str]:
    """Paragraphs, lines or words joined up to so many characters; neighbours share some."""
    chunks, now = list[str](), ""
    for part in _parts(text, size):
        if now and len(now) + len(part) > size:
            chunks.append(now.strip())
            now = now[len(now) - overlap :] if overlap else ""
            now = now[now.find(" ") + 1 :]
        now += part
    return [it for it in [*chunks, now.strip()] if it]


def by_sentences(text: str, words: int = 160) -> list[str]:
    """Whole sentences up to so many words: what no rule was made with."""
    chunks, now = list[str](), ""
    for sentence in re.findall(r"[^.!?]+[.!?]*\s*", text):
        if now and len((now + sentence).split()) > words:
            chunks.append(now.strip())
            now = ""
        now += sentence
    return [it for it in [*chunks, now.strip()] if it]


def by_headings(text: str) -> list[str]:
    """Sections of Markdown, each with its heading: what no rule was made with."""
    found = re.split(r"(?m)^(?=#{1,4} )", text)
    return [it.strip() for it in found if it.strip()]


def by_words(text: str, words: int = 200) -> list[str]:
    """So many words each, with the white space between them."""
    found = re.findall(r"\S+\s*", text)
    return ["".join(found[at : at + words]).strip() for at in range(0, len(found), words)]


SPLITTERS: dict[str, Callable[[str], list[str]]] = {
    "1,000 characters, 200 shared": by_characters,
    "200 words": by_words,
}
HELD_OUT_SPLITTERS: dict[str, Callable[[str], list[str]]] = {
    "sentences": by_sentences,
    "headings": by_headings,
}


def _parts(text: str, size: int) -> Iterator[str]:
    """Pieces that are no longer than ``size``: paragraphs, else lines, else words."""
    for paragraph in re.findall(r"(?s).+?(?:\n\n|\Z)", text):
        if len(paragraph) <= size:
            yield paragraph
            continue
        for line in paragraph.splitlines(keepends=True):
            yield from [line] if len(line) <= size else re.findall(r"\S+\s*", line)


# By when they were written down, beside the rules that were made with the first.
KINDS: dict[str, Mapping[str, Stack]] = {
    "stacks": STACKS,
    "held_out": HELD_OUT,
    "held_out_later": HELD_OUT_LATER,
    "held_out_last": HELD_OUT_LAST,
    "held_out_newest": HELD_OUT_NEWEST,
    "held_out_unseen": HELD_OUT_UNSEEN,
}
