"""Many different chunks made of real text: sentences of passages, mixed, with words exchanged."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

_ENDS = re.compile("(?<=[.!?])\\s+|(?<=[\u3002\uff01\uff1f])")
_CJK = re.compile(r"[\u4e00-\u9fff]")
_SENTENCES = 4  # of a chunk
_EXCHANGED = 0.1  # of the words of an English sentence
_CHINESE = 0.25  # of the chunks


class Texts:
    """Sentences and questions of a folder of JSON, JSON lines and text files."""

    def __init__(self, folder: Path) -> None:
        """Read them. Raises ValueError for a folder without sentences."""
        english, chinese = dict[str, None](), dict[str, None]()
        questions = dict[str, None]()
        for path in sorted(folder.rglob("*")):
            if path.suffix not in (".json", ".jsonl", ".txt") or "kv-retrieval" in path.parts:
                continue
            for name, text in _strings(path):
                if name in ("question", "query") and len(text) < 300:
                    questions[text] = None
                    continue
                for sentence in _ENDS.split(text[:200_000]):
                    if _CJK.search(sentence) and 12 <= len(sentence) <= 120:
                        chinese[sentence] = None
                    elif 40 <= len(sentence) <= 250 and not _CJK.search(sentence):
                        english[sentence] = None
        if not english:
            raise ValueError(f"{folder} holds no sentences")
        self.english = [one.split() for one in english]
        self.chinese = list(chinese)
        self.words = sorted({word for one in self.english for word in one})
        known = list(questions)
        foreign = [it for it in known if _CJK.search(it)]
        self.questions = [it for it in known if not _CJK.search(it)], foreign

    def chunk(self, number: int) -> str:
        """The text of a chunk, about 80 words or 200 characters; the same for the same number."""
        rng = np.random.default_rng([41, number])
        if self.chinese and rng.random() < _CHINESE:
            return "".join(self.chinese[i] for i in rng.integers(len(self.chinese), size=6))
        found = []
        for place in rng.integers(len(self.english), size=_SENTENCES):
            words = list(self.english[place])
            for exchanged in np.flatnonzero(rng.random(len(words)) < _EXCHANGED):
                words[exchanged] = self.words[rng.integers(len(self.words))]
            found.append(" ".join(words))
        return f"{' '.join(found)} No. {number}."

    def asked(self, count: int) -> list[str]:
        """Real questions, English ones and Chinese ones in turns, the same for each call."""
        rng = np.random.default_rng(7)
        pools = [pool for pool in self.questions if pool]
        return [pools[n % len(pools)][rng.integers(len(pools[n % len(pools)]))]
                for n in range(count)]  # fmt: skip


def _strings(path: Path) -> Iterator[tuple[str, str]]:
    """Texts of a file with the name of the field that each stands in."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".txt":
        yield "", text
        return
    try:
        values = [json.loads(text)]
    except ValueError:
        values = [json.loads(line) for line in text.splitlines() if line.strip()]
    for value in values:
        yield from _within("", value)


def _within(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, list):
        for one in value:
            yield from _within(name, one)
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _within(key, one)
