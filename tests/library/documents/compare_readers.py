"""Reads the cases with the project's readers and with other libraries, and says what each keeps.

    python tests/library/documents/compare_readers.py --peer-python ENV/bin/python --out FILE.json

Run it from the root of a checkout. Each library reads all files of a format in one process; what
it marks up in HTML or with backslashes is taken as the project writes it. Of a text that is lost it
is "said" where the library raises an error or, as the project's readers do, says what it left out.
"""

import argparse
import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "library")]

from documents import cases  # noqa: E402

from jaxrag.measure.machine import describe  # noqa: E402

# Each defines read(path) -> text, or (text, lines that say what was left out).
READERS = {
    "jaxrag": """
from jaxrag.library.documents.document import BadDocument
from jaxrag.library.documents.left_out import left_out_of
from jaxrag.library.documents.readers import read_open
def read(path):
    with open(path, "rb") as stream:
        found = list(read_open(stream, path, path))
    bad = [it.reason for it in found if isinstance(it, BadDocument)]
    good = [it for it in found if not isinstance(it, BadDocument)]
    if not good:
        raise ValueError(bad)
    says = [line for it in good for line in left_out_of(it.metadata)]
    metadata = [f"{k}: {v}" for it in good for k, v in it.metadata.items() if k != "left_out"]
    many = path.rpartition(".")[2] in ("csv", "tsv", "json", "jsonl")
    return "\\n".join([it.text for it in good] + metadata * many), says + bad
""",
    "markitdown": """
from markitdown import MarkItDown
made = MarkItDown()
read = lambda path: made.convert(path).text_content
""",
    "kreuzberg": """
import kreuzberg
read = lambda path: kreuzberg.extract_file_sync(path).content
""",
    "trafilatura": """
import trafilatura
read = lambda path: trafilatura.extract(open(path, "rb").read(), include_tables=True) or ""
""",
    "pdfplumber": """
import pdfplumber
read = lambda path: "\\n".join(page.extract_text() or "" for page in pdfplumber.open(path).pages)
""",
    "pypdfium2": """
import pypdfium2
def read(path):
    pages = pypdfium2.PdfDocument(path)
    return "\\n".join(page.get_textpage().get_text_range() for page in pages)
""",
    "pdfminer.six": """
from pdfminer.high_level import extract_text
read = extract_text
""",
    "mail-parser": """
import mailparser
read = lambda path: "\\n".join(mailparser.parse_from_file(path).text_plain or
                             mailparser.parse_from_file(path).text_html)
""",
    "python-calamine": """
from python_calamine import CalamineWorkbook
def read(path):
    book = CalamineWorkbook.from_path(path)
    rows = [row for name in book.sheet_names for row in book.get_sheet_by_name(name).to_python()]
    return "\\n".join(" | ".join(map(str, row)) for row in rows)
""",
}
ONLY = {
    "trafilatura": {".html"},
    "pdfplumber": {".pdf"},
    "pypdfium2": {".pdf"},
    "pdfminer.six": {".pdf"},
    "mail-parser": {".eml"},
    "python-calamine": {".xlsx"},
}
WORKER = """
import contextlib, io, json, re, sys, time
paths = json.load(sys.stdin)
with contextlib.redirect_stdout(io.StringIO()):
    try:
        exec(sys.argv[1])
    except ImportError:
        sys.exit(77)
    found, before = [], time.perf_counter()
    for path in paths:
        try:
            text = read(path)
            text, says = text if isinstance(text, tuple) else (text, [])
        except BaseException as error:
            text, says = None, [type(error).__name__ + ": " + str(error)[:200]]
        found.append((text, says))
    seconds = time.perf_counter() - before
peak = int(re.search("VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
print(json.dumps({"found": found, "seconds": seconds, "peak_mib": peak / 1024}))
"""
SIZES = """
import importlib.metadata as m, json, re, sys
def below(name, seen):
    if name not in seen:
        try:
            seen[name] = m.distribution(name)
        except m.PackageNotFoundError:
            return seen
        for line in seen[name].requires or []:
            if "extra ==" not in line:
                below(re.match(r"[\\w.-]+", line)[0].lower().replace("_", "-"), seen)
    return seen
found = {}
for name in json.load(sys.stdin):
    seen = below(name, {})
    if seen:
        size = sum(f.locate().stat().st_size for d in seen.values() for f in d.files or []
                   if f.locate().is_file())
        found[name] = {"version": seen[name].version, "installed_mib": size / 2**20}
print(json.dumps(found))
"""
OURS = {".pdf": ["pypdfium2"], ".docx": ["python-docx"], ".pptx": ["python-pptx"],
        ".xlsx": ["openpyxl"], ".rst": ["docutils"], ".org": ["orgparse"]}  # fmt: skip


def plain(text):
    """What other libraries mark up, as the project writes it."""
    text = re.sub(r"<su([pb])>(.*?)</su[pb]>", lambda it: "^_"["pb".index(it[1])] + it[2], text)
    return re.sub(r"\\([\W_])", r"\1", text).replace("**", "").replace("](", "] (")


def score(case, text, says):
    """Of one case: how much is wanted and kept, invented, lost and said, lost and silent."""
    if case.refused:
        lost, invented = [case.refused], [text] if text and text.strip() else []
    else:
        lost, invented = cases.judged(case, text or "")
    unsaid = [it for it in case.said if not any(it in line for line in says)]
    wanted = len(case.kept) + len(case.said) + bool(case.refused)
    silent = 0 if says and not invented else len(lost)
    silent = silent if not case.refused else bool(invented)
    return {
        "wanted": wanted,
        "kept": len(case.kept) - len(lost) * (not case.refused),
        "invented": len(invented),
        "lost and said": len(lost) + len(case.said) - silent - len(unsaid),
        "lost and silent": silent + len(unsaid),
    }


def run(python, program, *arguments, given):
    """What a program prints in another process; None where it needs what is not installed."""
    made = subprocess.run(
        [python, "-c", program, *arguments], input=json.dumps(given), capture_output=True,
        text=True, cwd=ROOT,
    )  # fmt: skip
    return json.loads(made.stdout.splitlines()[-1]) if made.returncode == 0 else None


def compare(peer_python, folder):
    """Rows of one format and library each."""
    every = [
        case
        for module in pkgutil.iter_modules(cases.__path__)
        for case in importlib.import_module(f"documents.cases.{module.name}").CASES
    ]
    by_format = {}
    for case in every:
        path = folder / str(len(by_format)) / case.name
        path.parent.mkdir(exist_ok=True)
        case.write(path)
        by_format.setdefault(path.suffix, []).append((case, str(path)))
    sizes = {"jaxrag": {}} | (run(peer_python, SIZES, given=[*READERS][1:]) or {})
    rows = []
    for suffix, some in sorted(by_format.items()):
        for name in sizes:
            if suffix not in ONLY.get(name, {suffix}):
                continue
            python = sys.executable if name == "jaxrag" else peer_python
            found = run(python, WORKER, READERS[name], given=[path for _, path in some])
            if found is None or all(text is None for text, _ in found["found"]):
                continue  # is not for this format
            scores = [
                score(case, text if text is None or name == "jaxrag" else plain(text), says)
                for (case, _), (text, says) in zip(some, found["found"], strict=True)
            ]
            total = {key: sum(it[key] for it in scores) for key in scores[0]}
            measured = {key: round(found[key], 3) for key in ("seconds", "peak_mib")}
            row = {"format": suffix, "library": name, "files": len(some), **total, **measured}
            if name == "jaxrag":
                brought = run(sys.executable, SIZES, given=OURS.get(suffix, ["lxml"]))
                row["installed_mib"] = sum(it["installed_mib"] for it in brought.values())
            rows.append(row | sizes[name])
            print(json.dumps(rows[-1]), file=sys.stderr)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(given.peer_python, Path(folder))
    result = {"benchmark": "readers", "rows": rows, "machine": describe()}
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
