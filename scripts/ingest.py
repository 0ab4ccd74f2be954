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

import sys
from collections.abc import Sequence

from jaxrag.base.errors import RequestError
from jaxrag.cli import run_command
from jaxrag.cli.command import Args, command, parse
from jaxrag.cli.ingest import BASIC, PARAMETERS
from jaxrag.cli.ingest import run as ingest
from jaxrag.cli.options import distributed_options, join


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and run; returns the exit code."""
    part = command(
        "ingest.py",
        run,
        __doc__ or "",
        "srun python scripts/ingest.py docs/ --kb kb --model models/llama --distributed",
        PARAMETERS,
        distributed_options("take the part of this process's rank"),
        basic=BASIC,
    )
    return run_command(run, parse(part, argv))


def run(args: Args) -> int:
    """Ingest the part of this process, which uses its own devices only."""
    if args.distributed and args.shard is not None:
        raise RequestError(f"--shard {args.shard} with --distributed: pass one of the two")
    if join(args):
        import jax

        args.shard = f"{jax.process_index()}/{jax.process_count()}"
    return ingest(args)


if __name__ == "__main__":
    sys.exit(main())
