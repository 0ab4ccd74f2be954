"""What mkdocs.yml cannot say: pages outside docs/, links between them, the page of commands.

The site's root is docs/ laid over the repository: README.md is its overview, and what a page
links to outside of docs/ is a page or a file of the site at the same path. Where a page says
``<!-- commands -->`` every command of the program is described, from its own parser.
"""

import argparse
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from jaxrag.cli import make_parser

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = "<!-- commands -->"
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what pages link to outside of docs/."""
    ahead = list(_outside(Path(str(file.abs_src_path)) for file in files))
    while ahead:
        name, path = ahead.pop()
        if files.get_file_from_path(name) is None:
            files.append(File.generated(config, name, abs_src_path=str(path)))
            ahead += _outside([path])
    return files


def _outside(pages: Iterable[Path]) -> Iterator[tuple[str, Path]]:
    """What pages link to that lies in the repository and not in docs/, with its place."""
    for path in pages:
        if path.suffix != ".md":
            continue
        for link in _LINK.findall(path.read_text(encoding="utf-8")):
            target = (path.parent / link).resolve()
            if target.is_file() and (ROOT / "docs") not in target.parents:
                yield _name(target), target


def _name(path: Path) -> str:
    """The place of a file of the repository in the site."""
    if path == ROOT / "README.md":
        return "overview.md"  # mkdocs takes a README.md for an index.md
    base = ROOT / "docs" if (ROOT / "docs") in path.parents else ROOT
    return path.relative_to(base).as_posix()


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links lead where files are in the site; describe the commands where that is wanted."""
    path = Path(str(page.file.abs_src_path))

    def moved(found: re.Match[str]) -> str:
        target = (path.parent / found[1]).resolve()
        if not target.is_file():
            return found[1]
        above = PurePosixPath(page.file.src_uri).parent
        return PurePosixPath(_name(target)).relative_to(above, walk_up=True).as_posix()

    markdown = _LINK.sub(moved, markdown)
    return markdown.replace(COMMANDS, "\n".join(describe(make_parser())))


def describe(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Markdown of a parser's commands, each with its usage, options and example."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in dict.fromkeys(action.choices.values()):
                yield from _command(command)


def _command(parser: argparse.ArgumentParser) -> Iterator[str]:
    level = "#" * len(parser.prog.split())
    yield f"\n#{level[1:]} {parser.prog}\n\n{parser.description or ''}\n"
    if any(isinstance(action, argparse._SubParsersAction) for action in parser._actions):
        yield from describe(parser)
        return
    formatter = argparse.HelpFormatter(parser.prog, width=88)
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
    yield f"```text\n{formatter.format_help().strip()}\n```\n"
    yield "| option | meaning |\n|---|---|"
    for action in parser._actions:
        if action.help is argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
            continue
        value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else "")
        if isinstance(value, tuple):
            value = " ".join(value)
        if not value and action.nargs != 0:
            value = action.dest.upper()
        names = [f"{name} {value}".strip() for name in action.option_strings] or [value]
        shown = ", ".join(f"`{name}`" for name in names).replace("|", "\\|")
        told = (action.help or "").replace("%%", "%").replace("|", "\\|").replace("<", "&lt;")
        yield f"| {shown} | {told} |"
    if parser.epilog:
        told = parser.epilog.removeprefix("example: ")
        yield f"\n```text\n{told}\n```\n"
