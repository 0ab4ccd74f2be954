"""Encode documents into one knowledge base from the actors of a Ray cluster.

The documents are dealt into --parts by the hash of their id, and Ray Data hands the parts to
--actors workers. Each of them loads the model once, opens the knowledge base for every part and
does what `jaxrag ingest --shard I/N` does. A part whose worker dies is begun again, and what it had
stored is found. Exit codes are those of `jaxrag ingest`.

All workers must see the paths under the same names, and the folder of the knowledge base on a file
system whose locks work among them.
"""

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxrag.base.errors import JaxragError, RequestError
from jaxrag.cli import run_command
from jaxrag.cli.ingest import add_arguments, files_of, ingest, model_for, print_report

if TYPE_CHECKING:
    from jaxrag.library.knowledge_base.reports import AddReport

_PARTS_PER_ACTOR = 4  # so that a worker with long documents does not keep the others waiting


class IngestPart:
    """The worker: keeps the model, ingests one part of the documents after another."""

    def __init__(self, args: argparse.Namespace, count: int) -> None:
        """Load the model that ``args`` names; the documents are dealt into ``count`` parts."""
        self._args = args
        self._count = count
        self._model = model_for(args)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """{"part": i} -> {"part": i, "report": AddReport} or, where it failed, {..., "error"}."""
        from jaxrag.library.documents import Shard

        shard = Shard(int(row["part"]), self._count)
        try:
            report = ingest(self._args, self._model, files_of(self._args), shard, progress=False)
        except JaxragError as error:  # the same every time: not for Ray to try again
            return {"part": shard.index, "report": None, "error": str(error)}
        return {"part": shard.index, "report": report, "error": ""}


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and run; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python scripts/ray_ingest.py /data/docs --kb /data/kb "
        "--model /data/models/llama --actors 8 --gpus 1",
    )
    add_arguments(parser)
    parser.add_argument("--actors", type=int, default=1, metavar="N", help="workers (1)")
    parser.add_argument("--parts", type=int, metavar="N", help="of the work (4 a worker)")
    parser.add_argument("--gpus", type=float, default=0, metavar="N", help="of a worker (0)")
    parser.add_argument("--cpus", type=float, default=1, metavar="N", help="of a worker (1)")
    parser.add_argument("--address", metavar="ADDRESS", help="of the cluster (a local one)")
    return run_command(run, parser.parse_args(argv))


def run(args: argparse.Namespace) -> int:
    """Ingest all parts on the cluster and print one report."""
    try:
        import ray
        import ray.data
    except ImportError:
        raise RequestError("ray is not installed; pip install 'jaxrag[ray]'") from None
    if args.sync:
        raise RequestError("--sync needs all documents; run `jaxrag ingest --sync` afterwards")
    if args.shard is not None:
        raise RequestError(f"--shard {args.shard}: the parts are dealt here; use --parts N")
    parts = args.parts or _PARTS_PER_ACTOR * args.actors
    if args.actors < 1 or parts < args.actors:
        raise RequestError(
            f"--actors {args.actors} --parts {parts}: expected at least one, and a part for each"
        )
    files_of(args)  # refuses bad paths and options before a cluster is asked for
    start = time.perf_counter()
    ray.init(address=args.address, log_to_driver=False)
    try:
        work = ray.data.from_items([{"part": part} for part in range(parts)]).repartition(parts)
        done = work.map(
            IngestPart,
            fn_constructor_args=(args, parts),
            compute=ray.data.ActorPoolStrategy(size=args.actors),
            num_cpus=args.cpus,
            num_gpus=args.gpus,
        ).take_all()
    finally:
        ray.shutdown()
    failed = [row for row in done if row["report"] is None]
    if failed:
        raise RequestError(f"part {failed[0]['part']} of {parts}: {failed[0]['error']}")
    report = merged([row["report"] for row in done], time.perf_counter() - start)
    print_report(report, args.json)
    return 3 if report.skipped else 0


def merged(reports: Sequence["AddReport"], seconds: float) -> "AddReport":
    """One report of several parts: counts are added, ``seconds`` is the whole run's."""
    from jaxrag.library.knowledge_base.ingest import UNKNOWN_EXAMPLES

    own = ("skipped", "seconds", "unknown_words", "neighbours", "removed", "gone")
    names = [f.name for f in dataclasses.fields(reports[0]) if f.name not in own]
    unknown = dict.fromkeys(word for report in reports for word in report.unknown_words)
    return dataclasses.replace(
        reports[0],
        **{name: sum(getattr(report, name) for report in reports) for name in names},
        skipped=tuple(itertools.chain.from_iterable(report.skipped for report in reports)),
        seconds=seconds,
        unknown_words=tuple(unknown)[:UNKNOWN_EXAMPLES],
    )


if __name__ == "__main__":
    sys.exit(main())
