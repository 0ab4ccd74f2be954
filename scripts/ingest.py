"""Encode documents into one knowledge base from many processes, for clusters.

Every process takes its part of the documents by the hash of their id, and all of them write into
one repository and one catalog; equal chunks are kept once, whoever encodes them. A killed process
goes on where it stopped when it is started again with the same part. Exit codes are those of
`jaxrag ingest`: 0 everything is in, 3 documents were left out, 1 nothing more could be done.

The parts are named with --shard I/N, or with --distributed are the ranks of jax.distributed, which
knows Slurm, Open MPI and TPU pods by itself and takes --coordinator, --processes and --process-id
from anybody else. The folder of the knowledge base holds an SQLite file: it must be on a file
system whose locks work among the processes.
"""

import argparse
import sys
from collections.abc import Sequence

from jaxrag.cli import run_command
from jaxrag.cli.ingest import add_arguments
from jaxrag.cli.ingest import run as ingest
from jaxrag.errors import RequestError

_LONGEST_RUN = 30 * 86_400  # seconds that the first process to end waits for the last


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and run; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: srun python scripts/ingest.py docs/ --kb kb --model models/llama "
        "--distributed",
    )
    add_arguments(parser)
    parser.add_argument(
        "--distributed", action="store_true", help="take the part of this process's rank"
    )
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0, where needed")
    parser.add_argument("--processes", type=int, metavar="N", help="how many, where needed")
    parser.add_argument("--process-id", type=int, metavar="I", help="which one, where needed")
    return run_command(run, parser.parse_args(argv))


def run(args: argparse.Namespace) -> int:
    """Ingest the part of this process."""
    given = (args.coordinator, args.processes, args.process_id)
    if args.distributed:
        if args.shard is not None:
            raise RequestError(f"--shard {args.shard} with --distributed: pass one of the two")
        args.shard = rank_shard(*given)
    elif given != (None, None, None):
        raise RequestError("--coordinator, --processes and --process-id need --distributed")
    return ingest(args)


def rank_shard(
    coordinator: str | None = None, processes: int | None = None, process_id: int | None = None
) -> str:
    """Join jax.distributed; returns "I/N" of this process.

    Every process uses its own devices only. Raises RequestError when it cannot join.
    """
    import jax

    try:
        jax.distributed.initialize(
            coordinator, processes, process_id, shutdown_timeout_seconds=_LONGEST_RUN
        )
    except (RuntimeError, ValueError) as error:
        raise RequestError(
            f"jax.distributed cannot start ({' '.join(str(error).split())[:200]}); pass "
            "--coordinator, --processes and --process-id, or --shard I/N"
        ) from None
    return f"{jax.process_index()}/{jax.process_count()}"


if __name__ == "__main__":
    sys.exit(main())
