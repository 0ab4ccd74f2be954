"""Markdown, notebooks and plain text: odd front matter, pictures as data, suffixes, encodings."""

import json
from functools import partial

from documents.cases import Case
from documents.cases.web import write

PICTURE = "data:image/png;base64," + "QUJD" * 20_000


def text(kind, name, body, encoding="utf-8", **what):
    return Case(kind, name, partial(write, text=body, encoding=encoding), **what)


def front(name, head, said=("1 front matter read line by line",), **what):
    body = f"---\n{head}\n---\n\nThe fee is 3 dollars.\n"
    what.setdefault("kept", ("The fee is 3 dollars.",))
    return text("front matter", f"{name}.md", body, said=said, **what)


def notebook(*sources):
    cells = [{"cell_type": "markdown", "metadata": {}, "source": it} for it in sources]
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells})


CASES = [
    front("colon", "title: Primer: Deploying contracts\ntags: [a, b]"),
    front("tab", "title: Tabs\nlist:\n\t- a"),
    front("template", "title: {{ page.title }}"),
    front("at", "author: @ann\ndescription: `code`"),
    front("percent", "share: %5\ntitle: x"),
    front("sentence", "Note: the office is closed on 24 December.", said=(),
          kept=("the office is closed on 24 December.", "The fee is 3 dollars.")),
    front("sentences", "Warning: the pier is wet!\nNote: bring boots.", said=(),
          kept=("the pier is wet!", "bring boots.", "The fee")),
    front("plain", "title: Fees\ndraft: false", said=(), invented=("draft",)),
    text("front matter", "alone.md", "---\ntitle: Shop\nsummary: It opens at nine.\n---\n",
         kept=("It opens at nine.",)),
    text("pictures as data", "report.md", f"# Report\n\nSales rose to 41 million.\n\n![chart "
         f"of sales]("
         f"{PICTURE})\n\nThe outlook is stable.\n", kept=("41 million.", "chart of sales",
         "stable."),
         invented=("QUJDQUJD",), said=("1 picture inlined as data",)),
    text("pictures as data", "link.md", f"Get [the table](data:text/csv;base64,{'QUJD' * 99}) "
         f"here.\n",
         kept=("the table", "here."), invented=("QUJDQUJD",), said=("1 picture inlined",)),
    text("pictures as data", "reference.md", f"![pump][p] runs.\n\n[p]: {PICTURE}\n",
         kept=("pump", "runs."), invented=("QUJDQUJD",), said=("1 picture inlined",)),
    text("pictures as data", "book.ipynb", notebook(f"# NB\n![x]({PICTURE})\nThe rate is 3%.",
         "![dam](attachment:image.png)"), kept=("NB", "The rate is 3%.", "dam"),
         invented=("QUJDQUJD", "attachment"), said=("2 pictures inlined",)),
    text("suffixes", "a.markdown", "---\ntitle: T\n---\n# Wells\n\nSalt.\n", kept=("Wells",
         "Salt."),
         invented=("title",)),
    text("suffixes", "b.mdx", "# Wells\n\nSalt and <b>oats</b>.\n", kept=("Wells", "oats")),
    text("suffixes", "c.text", "Salt.\n", kept=("Salt.",)),
    text("suffixes", "d.log", "9:40 pump started\n", kept=("9:40 pump started",)),
    text("encoding", "one-bad-byte.txt", "Café und Grüße. ".encode() + b"bad \xe9 here",
         kept=("Café und Grüße. bad \ufffd here",), said=("1 byte not in UTF-8",)),
    text("encoding", "latin.txt", "François wohnt in der Straße 7.", encoding="cp1252",
         kept=("François wohnt in der Straße 7.",), said=("2 bytes not in UTF-8, read as cp1252",)),
    text("encoding", "binary.txt", bytes(range(128, 256)) * 20, refused="is not UTF-8"),
]  # fmt: skip
