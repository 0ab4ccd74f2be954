"""Writes some hundred pages of texts in every format by office programs, reads them, and counts.

    python tests/library/documents/read_pages.py --texts nq-open-oracle.jsonl --out FILE.json

Documents of twelve passages, with headings, lists and a table of their figures, are written by
pandoc and LibreOffice, which share nothing with the readers. Counted are the words and the numbers
that are read again, and the numbers that nobody wrote.
"""

import argparse
import collections
import itertools
import json
import re
import string
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from jaxrag.library.documents.document import BadDocument  # noqa: E402
from jaxrag.library.documents.left_out import left_out_of  # noqa: E402
from jaxrag.library.documents.readers import read_open  # noqa: E402
from jaxrag.measure.machine import describe  # noqa: E402

PASSAGES, WORDS_OF_A_PAGE = 12, 300
PANDOC = ("docx", "pptx", "epub", "html", "rst", "org", "ipynb")
OFFICE = {"pdf": ("docx", "pdf"), "office.docx": ("html", "docx:MS Word 2007 XML"),
          "xlsx": ("csv", "xlsx"), "slides.pdf": ("pptx", "pdf")}  # fmt: skip
COMMAS_IN_UTF_8 = "--infilter=Text - txt - csv (StarCalc):44,34,76"
NUMBER = re.compile(r"\d+(?:[.,:/]\d+)*")
WORD = re.compile(r"[^\W\d_]+")


def passages(path):
    """Titles and texts, one a line of NQ-open's oracle file, without what Markdown would take."""
    for line in path.read_text(encoding="utf-8").splitlines():
        [it] = json.loads(line)["ctxs"]
        yield [re.sub(r"[^\w\s.,:;()%/-]", "", part) for part in (it["title"], it["text"])]


def markdown(group):
    """Headings, paragraphs, a list of titles and a table of the first numbers."""
    lines = [f"# {group[0][0]}", ""]
    lines += [f"- {title}" for title, _ in group] + [""]
    for title, text in group:
        lines += [f"## {title}", "", re.sub(r"^(\d+)([.)])", r"\1\\\2", text), ""]
    lines += ["| Passage | Words | Share |", "| --- | --- | --- |"]
    lines += [f"| {title} | {len(text.split())} | {len(text) / 7:.2f} |" for title, text in group]
    return "\n".join(lines) + "\n"


def write(folder, texts, documents):
    """Files of every format, by format; each source is beside them as plain text."""
    made = collections.defaultdict(list)
    groups = itertools.islice(itertools.batched(texts, PASSAGES), documents)
    for number, group in zip(string.ascii_lowercase, groups, strict=False):
        source = folder / f"{number}.md"
        source.write_text(markdown(group), encoding="utf-8")
        plain = folder / f"{number}.source"
        _run("pandoc", source, "-t", "plain", "--wrap=none", "-o", plain)
        made["md"].append((source, plain))
        for kind in PANDOC:
            path = folder / f"{number}.{kind}"
            _run("pandoc", source, "-s", "--metadata", "title= ", "-o", path)
            made[kind].append((path, plain))
        table = folder / f"{number}.csv"
        rows = [f'"{title}","{len(text.split())}","{text}"' for title, text in group]
        table.write_text("\n".join(["Passage,Words,Text", *rows]) + "\n", encoding="utf-8")
        made["csv"].append((table, table))
    for name, (of, to) in OFFICE.items():
        out = folder / name
        sources = [path for path, _ in made[of]]
        how = [COMMAS_IN_UTF_8] * (of == "csv")
        _run("soffice", "--headless", *how, "--convert-to", to, "--outdir", out, *sources)
        suffix = name.rpartition(".")[2]
        made[name] = [(out / f"{path.stem}.{suffix}", plain) for path, plain in made[of]]
    return made


def _run(*words):
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def counted(text):
    """Its words and its numbers."""
    return collections.Counter(WORD.findall(text)), collections.Counter(NUMBER.findall(text))


def read(path):
    """The text of a file, and what its reader says."""
    with path.open("rb") as stream:
        found = list(read_open(stream, str(path), path.name))
    good = [it for it in found if not isinstance(it, BadDocument)]
    says = [it.reason for it in found if isinstance(it, BadDocument)]
    says += [line for it in good for line in left_out_of(it.metadata)]
    return "\n".join(it.text for it in good), says


def measured(files):
    """Words and numbers of the sources of some files, how many of them are kept, what is new."""
    row, lost, lines = collections.Counter(), [], []
    for path, plain in files:
        text, says = read(path)
        lines += says
        both = zip(counted(plain.read_text(encoding="utf-8")), counted(text), strict=True)
        for what, (wanted, got) in zip(("words", "numbers"), both, strict=True):
            row[what] += wanted.total()
            row[f"{what} kept"] += (wanted & got).total()
            lost += wanted - got
            if what == "numbers":
                row["numbers changed"] += len(set(got) - set(wanted))
    shares = {f"share of {it}": row[f"{it} kept"] / row[it] for it in ("words", "numbers")}
    return {**row, **shares, "lost": lost[:8], "said": sorted(set(lines))[:8]}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=7, help="of each format")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for kind, files in write(Path(name), passages(args.texts), args.documents).items():
            rows.append({"format": kind, "files": len(files), **measured(files)})
            print(json.dumps(rows[-1], ensure_ascii=False), flush=True)
    pages = sum(row["words"] for row in rows) / WORDS_OF_A_PAGE
    print(f"{pages:.0f} pages")
    if args.out:
        result = {"pages": round(pages), "rows": rows, "machine": describe()}
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
