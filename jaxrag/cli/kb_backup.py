"""`jaxrag kb backup` and `jaxrag kb restore`: a knowledge base put aside, and brought back."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxrag.cli.command import Args, argument, command, flag
from jaxrag.cli.options import JSON, KB
from jaxrag.cli.output import counted, give, human_count
from jaxrag.models.text.printable import printable

if TYPE_CHECKING:
    from jaxrag.library.knowledge_base.backup import RestoreReport


def run_backup(args: Args) -> None:
    """Print what was put aside."""
    from jaxrag.library.knowledge_base.backup import back_up
    from jaxrag.library.knowledge_base.settings import find_folder
    from jaxrag.server.state.uploads import uploads_of

    folder = find_folder(args.kb)
    report = back_up(folder, find_folder(args.backup), uploads_of(folder), progress=not args.json)
    line = (
        f"{counted(report.documents, 'document')}, {counted(report.chunks, 'chunk')}, "
        f"{counted(report.uploads, 'upload')} as of change {report.changes}: "
        f"{human_count(report.nbytes)}B in {report.folder}"
    )
    give(args, report, [printable(line)])


def run_restore(args: Args) -> None:
    """Print what was brought back, and what was not."""
    from jaxrag.library.knowledge_base.backup import restore
    from jaxrag.library.knowledge_base.settings import find_folder
    from jaxrag.server.state.uploads import uploads_of

    folder = find_folder(args.kb)
    report = restore(
        folder, find_folder(args.backup), accept_older=args.accept_older,
        with_removed=args.with_removed, uploads=uploads_of(folder), progress=not args.json,
    )  # fmt: skip
    give(args, report, map(printable, _lines(report)))


def _lines(report: "RestoreReport") -> Iterator[str]:
    uploads = f", {counted(report.uploads, 'upload')}" * bool(report.uploads)
    held = f"{counted(report.documents, 'document')}, {counted(report.chunks, 'chunk')}{uploads}"
    yield f"{held} in {report.folder}, which is at change {report.changes}"
    if report.undone:
        yield f"{counted(report.undone, 'document')} added or changed since: as in the backup now"
    for ids, fate in (
        (report.removed, "removed since: left out"),
        (report.returned, "removed since: back"),
    ):
        if ids:
            yield f"{counted(len(ids), 'document')} {fate}: {', '.join(ids)}"
    if report.left:
        yield (
            f"{counted(report.left, 'upload')} left in the backup: {report.folder} is not "
            "DATA/tenants/NAME/stores/ID of a server"
        )
    if report.kept:
        yield f"the catalog that was here is kept as {report.kept}"
    yield (
        "KV that is stored is found by its key; "
        f"`jaxrag kb verify --repair {report.folder}` makes what is missing"
    )


_BACKUP = argument("backup", "BACKUP", "folder of the backup")
BACKUP = command(
    "backup",
    run_backup,
    "write documents, settings, names of KV and uploads to a new folder, while the knowledge base "
    "is in use",
    "jaxrag kb backup kb backups/monday",
    [KB, _BACKUP, JSON],
)
RESTORE = command(
    "restore",
    run_restore,
    "bring a knowledge base back from a backup; refused where it is newer than that",
    "jaxrag kb restore kb backups/monday",
    [KB, _BACKUP, JSON],
    flag(
        "--accept-older",
        "lose what was added and changed since the backup; what was removed since stays removed",
    ),
    flag("--with-removed", "the same, and bring back what was removed since"),
)
