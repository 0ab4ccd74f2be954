"""The pages: links lead somewhere, and what they tell a reader to type runs as it is printed.

A fence is tagged ``bash`` (commands that run here, in order), ``python`` (runs here, names shared
by a page), ``text`` (a picture; directly behind one of these, what it prints, times apart), or
``console`` (commands that need what is not here: read by the program's own parser, not run).
"""

import ast
import asyncio
import contextlib
import dataclasses
import gc
import importlib
import io
import itertools
import re
import runpy
import shlex
import shutil
import sys
import threading
import urllib.parse
import warnings
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

import jaxrag
import jaxrag.cli
from jaxrag.cli.command import parse
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.models.model import load_model
from jaxrag.reuse.methods import METHODS
from jaxrag.server.http.run import Server, bind, url_of
from jaxrag.server.options import ModelSettings
from jaxrag.server.settings import ServerSettings
from jaxrag.server.state.state import make_state

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
MARKDOWN = [
    path
    for path in sorted(ROOT.rglob("*.md"))
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
]
LARGEST_README = 8000  # bytes
LINKED = ("benchmarks", "checkpoints", "configs", "examples", "scripts")  # what commands read
KB = Path(".cache", "village")  # made by the README, read by other pages
# What pages ask; a test gives them one on another port, started as docs/server.md says.
SERVER = "http://127.0.0.1:8000"
TAGS = {
    "jaxrag.forgotten",
    "jaxrag.json",
    "jaxrag.model",
    "jaxrag.variant",
}  # of the storage format, not modules
# 8.4 ms, 1.2 s, 340 tokens/s: they differ from run to run.
TIME = re.compile(r"\b[\d.]+[kM]?(?= (?:m?s\b|chunks/(?:s|min)\b|tokens/s\b)|x sooner)")
# Not where a page before compiled the same.
COMPILED = re.compile(r"^(?:\(.* of it compiling\)| +compile .* ms, once)\n", re.M)
PROGRESS = re.compile(r"^\w+: +\d+%\|.*\]\n", re.M)  # of work that takes ten seconds somewhere


@dataclasses.dataclass(frozen=True)
class Block:
    """One fence; ``prints`` is what the page says that it prints, None where it does not say."""

    tag: str
    text: str
    line: int
    prints: str | None


def blocks(page):
    tokens = MarkdownIt("commonmark").parse(page.read_text(encoding="utf-8"))
    after = [*tokens[1:], None]
    for token, next_one in zip(tokens, after, strict=True):
        if token.type == "fence":
            shown = next_one is not None and (next_one.type, next_one.info) == ("fence", "text")
            yield Block(
                token.info, token.content, token.map[0] + 1, next_one.content if shown else None
            )


def commands(text):
    """The words of every command of a listing, without comments."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        for is_and, group in itertools.groupby(words, lambda word: word == "&&"):
            if not is_and:
                yield list(group)


def names(pages):
    return [str(page.relative_to(ROOT)) for page in pages]


# Links


def headings(path):
    """Anchors of a page's headings, as GitHub makes them."""
    tokens = MarkdownIt("commonmark").parse(path.read_text(encoding="utf-8"))
    found = set()
    for opening, inline in itertools.pairwise(tokens):
        if opening.type == "heading_open":
            text = "".join(part.content for part in inline.children)
            anchor = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            while anchor in found:
                anchor += "-1"
            found.add(anchor)
    return found


def links(path):
    tokens = MarkdownIt("commonmark").enable("table").parse(path.read_text(encoding="utf-8"))
    for inline in tokens:
        for part in inline.children or ():
            if part.type in ("link_open", "image"):
                yield urllib.parse.unquote(part.attrGet("href") or part.attrGet("src"))


@pytest.mark.parametrize("path", MARKDOWN, ids=names(MARKDOWN))
def test_links_lead_somewhere(path):
    dead = []
    for link in links(path):
        if re.match(r"[a-z]+:", link):
            continue  # elsewhere
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists() or (anchor and anchor not in headings(target)):
            dead.append(link)
    assert not dead


def test_every_page_can_be_reached_by_links():
    seen, ahead = set(), [README]
    while ahead:
        page = ahead.pop()
        seen.add(page)
        found = [(page.parent / link.split("#")[0]).resolve() for link in links(page)]
        ahead += [other for other in found if other.suffix == ".md" and other not in seen]
    assert set(PAGES) <= seen


# What pages name


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_what_a_page_names_is_there(page):
    """Files, modules and make targets in `code`, and the options of commands."""
    text = page.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    spans = [
        " ".join(part.content.split())
        for inline in tokens
        for part in inline.children or ()
        if part.type == "code_inline"
    ]
    folders = "benchmarks|checkpoints|configs|docs|examples|jaxrag|pallas_kernels|scripts|tests"
    missing = []
    for span in spans:
        if re.fullmatch(rf"(?:{folders})/[\w./-]*", span) and not (ROOT / span).exists():
            missing.append(span)
        if re.fullmatch(r"jaxrag(?:\.\w+)+", span) and not (span in TAGS or is_there(span)):
            missing.append(span)
        if found := re.match(r"python (\S+/\S+\.py)", span):
            missing += [span] * (not (ROOT / found[1]).is_file())
        if span.startswith("make ") and not re.search(rf"^{span.split()[1]}:", makefile, re.M):
            missing.append(span)
        if span.startswith("jaxrag ") and (said := refusal(shlex.split(span))):
            missing.append(f"{span}: {said}")
    assert not missing, "\n".join(missing)


def is_there(dotted):
    """Is it a module, or a name in one?"""
    module, _, name = dotted.rpartition(".")
    try:
        return hasattr(importlib.import_module(module), name) or bool(
            importlib.import_module(dotted)
        )
    except ModuleNotFoundError:
        return False


def refusal(words):
    """What the program's parser says of words that it refuses; "" where only some are missing."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            parse(jaxrag.cli.PROGRAM, words[1:])
        except SystemExit:
            last = said.getvalue().splitlines()[-1]
            return "" if "Missing" in last else last
    return ""


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("jaxrag ask --json", ""),
        ("jaxrag ask Q --kb kb --jsonn", "No such option '--jsonn'"),
        ("jaxrag bench nothing", "No such command"),
        ("jaxrag kb gc kb --grace soon", "expected a time"),
    ],
)
def test_what_counts_as_a_refusal(command, words):
    said = refusal(command.split())
    assert words in said if words else said == ""


def test_the_readme_is_short():
    assert len(README.read_bytes()) <= LARGEST_README


def test_the_site_leads_to_every_page():
    """Its navigation; the pages beside docs/ are checked where it is built (`make lint`)."""
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = re.findall(r"^ +- [^:]+: (\S+\.md)$", site, re.M)
    assert len(set(named)) == len(named)
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= set(named)


def test_the_reference_has_every_public_name():
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    named = re.findall(r"^::: jaxrag\.(\w+)$", page, re.M)
    assert len(set(named)) == len(named)
    assert set(named) - {"errors"} == set(jaxrag.__all__)


def test_every_exit_code_is_told():
    """Those that the commands return by number or by a name beside it."""
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    told = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.M)}
    returned = {0, 2}  # argparse's
    for path in (ROOT / "jaxrag" / "cli").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        returned |= {int(code) for code in re.findall(r"\breturn (\d+)\b", text)}
        named = re.findall(r"^([A-Z]+) = (\d+)  #", text, re.M)
        returned |= {int(code) for name, code in named if f"return {name}" in text}
    assert told == returned


def test_every_method_is_in_the_readme_and_described():
    """With the encoder that its chunks have."""
    readme = README.read_text(encoding="utf-8")
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    for name, method in METHODS.items():
        (row,) = [row for row in rows if f"`{name}`" in row[1]]
        assert f"`{name}`" in readme or name == "full_attention"
        assert method.encoder is None or f"`{method.encoder}`" in row[2]
        assert method.positions in row[3]


def test_the_glossary_says_a_word_once():
    text = (ROOT / "GLOSSARY.md").read_text(encoding="utf-8")
    text = text[: text.index("## The papers' words")]
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]
    words = [word for row in rows for word in row.split(", ") if word.strip("-") and word != "word"]
    assert len(words) > 80
    assert not {word for word in words if words.count(word) > 1}


# Drawings


def drawing(heading):
    """The first listing of the architecture behind some words."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return re.search(r"```text\n(.*?)```", text[text.index(heading) :], re.S)[1]


def floors():
    tree = ast.parse((ROOT / "tests" / "test_imports.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLOORS":
            return ast.literal_eval(node.value)[::-1]
    raise AssertionError("tests/test_imports.py has no table of floors")


def test_the_floors_are_drawn_as_they_are():
    rows = [line.split() for line in drawing("## Floors").splitlines()]
    assert [(int(row[0]), set(row[1:])) for row in rows[::-1]] == [
        (number, set(row)) for number, row in enumerate(floors(), 1)
    ]


@pytest.mark.parametrize("what", ["A question", "A document", "A chat", "A training sample"])
def test_a_walk_leads_down_and_climbs_back_at_most_once(what):
    floor = {name: number for number, row in enumerate(floors()) for name in row}
    way, asked = [], []
    for line in drawing(f"**{what}**").splitlines():
        step, asks, files = line.partition(">")
        if line[0] != " ":
            way.append(step.strip())
        if asks:
            asked.append([way[-1]])
        elif line[0] == " ":  # the files before go on
            files = step
        if files:
            asked[-1] += files.split()
    for name in {*way, *itertools.chain(*asked)}:
        assert (ROOT / "jaxrag" / name).is_file(), name

    def climbs(files):
        floors = [floor[name.split("/")[0]] for name in files]
        return sum(upper > lower for lower, upper in itertools.pairwise(floors))

    assert climbs(way) <= 1
    assert not [files for files in asked if climbs(files)]


# What pages tell to type


@pytest.fixture(scope="module")
def after_readme(tmp_path_factory):
    """A folder like a clone, in which everything that the README says was typed."""
    folder = clone(tmp_path_factory.mktemp("readme"))
    run_page(README, folder)
    return folder


def clone(folder):
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    return folder


@contextlib.contextmanager
def serving(folder):
    """The URL of a server over the README's knowledge base."""
    model = load_model(folder / "checkpoints/synthetic-0.8m/dual")
    settings = ServerSettings(ModelSettings(name="synthetic"), port=0, warm_up=False)
    ready, loops = threading.Event(), []
    with KnowledgeBase.open(folder / KB, model=model) as kb, bind(settings) as bound:
        server = Server(make_state(settings, model, {"village": kb}), bound)

        async def serve():
            loops.append(asyncio.get_running_loop())
            await server.serve(ready.set)

        thread = threading.Thread(target=asyncio.run, args=(serve(),))
        thread.start()
        try:
            assert ready.wait(300)
            yield url_of(bound)
        finally:
            loops[0].call_soon_threadsafe(server.end)
            thread.join(60)
    assert not thread.is_alive()


def run_page(page, folder):
    """Type what a page says, in a folder."""
    namespace = {"__name__": page.stem}
    found = list(blocks(page))
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.chdir(folder)
        stack.callback(drop, namespace)
        if any(SERVER in block.text for block in found if block.tag == "python"):
            url = stack.enter_context(serving(folder))
            found = [dataclasses.replace(it, text=it.text.replace(SERVER, url)) for it in found]
        for block in found:
            if block.tag not in ("bash", "python"):
                continue
            where = f"{page.relative_to(ROOT)}:{block.line}"
            out = io.StringIO()  # a page shows what a terminal shows
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                if block.tag == "python":
                    exec(compile(block.text, where, "exec"), namespace)
                else:
                    for words in commands(block.text):
                        code = run(words)
                        assert code == 0, f"{where}: {shlex.join(words)}: {out.getvalue()}"
            if block.prints is not None:
                assert_prints(out.getvalue(), block.prints, where)


def drop(namespace):
    """Free what a page made. It leaves its clients open, as a short program may."""
    namespace.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def run(words):
    """Run a command in this process; returns its exit code."""
    if words[0] == "jaxrag":
        return jaxrag.cli.main(words[1:])
    assert words[0] == "python", f"{words[0]}: no test runs this; tag the listing as console"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words[1:])
        try:
            runpy.run_path(words[1], run_name="__main__")
        except SystemExit as leaving:
            return leaving.code or 0
    return 0


def assert_prints(out, prints, where):
    """The same lines, but for times; a last line "..." leaves out what follows."""
    got, said = (
        [TIME.sub("#", line).rstrip() for line in bare.strip().splitlines()]
        for bare in (PROGRESS.sub("", COMPILED.sub("", text)) for text in (out, prints))
    )
    if said[-1] == "...":
        said = said[:-1]
        got = got[: len(said)]
    assert got == said, where


def test_the_readme_runs_as_printed(after_readme):
    assert (after_readme / KB / "catalog.sqlite").is_file()


LONG = ("evaluation.md", "methods.md")  # half a minute each: with the slow tests
RUN = [
    page
    for page in PAGES
    if page != README and any(block.tag in ("bash", "python") for block in blocks(page))
]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if page.name in LONG else (), id=name)
        for page, name in zip(RUN, names(RUN), strict=True)
    ],
)
def test_a_page_runs_as_printed(page, after_readme, tmp_path):
    clone(tmp_path)
    shutil.copytree(after_readme / KB, tmp_path / KB)
    run_page(page, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_commands_that_need_more_are_at_least_read(page):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for block in blocks(page):
        assert block.tag in ("bash", "console", "python", "text"), f"{page.name}:{block.line}"
        for words in commands(block.text) if block.tag == "console" else ():
            if words[0] == "jaxrag":
                assert not refusal(words), f"{page.name}:{block.line}: {shlex.join(words)}"
            elif words[0] == "python":
                assert (ROOT / words[1]).is_file(), words
            elif words[0] == "make":
                assert re.search(rf"^{words[1]}:", makefile, re.M), words
