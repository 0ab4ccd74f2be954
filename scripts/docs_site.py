"""What mkdocs.yml cannot say: pages outside docs/, links between them, the page of commands.

The site's root is docs/ laid over the repository: README.md is its overview, and what a page
links to outside of docs/ is a page or a file of the site at the same path. Where a page says
``<!-- commands -->`` every command of the program is described, from its own parser.
"""

import html
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from jaxrag.cli import PROGRAM
from jaxrag.cli.command import commands_of

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
    return markdown.replace(COMMANDS, "\n".join(describe(PROGRAM)))


def describe(program: click.Command) -> Iterator[str]:
    """Markdown of a program's commands, each with its usage, options and example."""
    for path, command in list(commands_of(program))[1:]:
        ctx = click.Context(command, info_name=path, **command.context_settings)
        yield f"\n{'#' * len(path.split())} {path}\n\n{command.help or ''}\n"
        if isinstance(command, click.Group):
            continue
        yield f"```text\n{command.get_usage(ctx)}\n```\n"
        yield "| option | meaning |\n|---|---|"
        for parameter in command.get_params(ctx):
            record = parameter.get_help_record(ctx)
            shown, told = (html.escape(one).replace("|", "&#124;") for one in record or ("", ""))
            yield f"| <code>{shown}</code> | {told} |"
        yield f"\n```text\n{(command.epilog or '').removeprefix('example: ')}\n```\n"
