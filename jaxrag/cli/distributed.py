"""The flags of jax.distributed, for commands that run as one program on many hosts."""

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Iterator

from jaxrag.base.errors import JaxragError, RequestError
from jaxrag.models.text.printable import printable

_LONGEST_RUN = 30 * 86_400  # seconds that the first process to end waits for the last


def add_distributed(parser: argparse.ArgumentParser, what: str) -> None:
    """Flags that ``join`` reads; ``what`` is the help text of --distributed."""
    parser.add_argument("--distributed", action="store_true", help=what)
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0, where needed")
    parser.add_argument("--processes", type=int, metavar="N", help="how many, where needed")
    parser.add_argument("--process-id", type=int, metavar="I", help="which one, where needed")


def join(args: argparse.Namespace) -> bool:
    """Join jax.distributed where --distributed says so; returns whether it did.

    Slurm, Open MPI and TPU pods are known to JAX; anybody else names coordinator, number and rank.
    Raises RequestError when it cannot join, or for one of those flags without --distributed.
    """
    given = (args.coordinator, args.processes, args.process_id)
    if not args.distributed:
        if given != (None, None, None):
            raise RequestError("--coordinator, --processes and --process-id need --distributed")
        return False
    import jax

    try:
        jax.distributed.initialize(*given, shutdown_timeout_seconds=_LONGEST_RUN)
    except (RuntimeError, ValueError) as error:
        raise RequestError(
            f"jax.distributed cannot start ({' '.join(str(error).split())[:200]}); pass "
            "--coordinator, --processes and --process-id"
        ) from None
    return True


@contextlib.contextmanager
def ending_all() -> Iterator[None]:
    """Within, a process of several that run one program ends at once when it fails: exit code 1.

    It would wait at its end for the others, and they for its part of the next step. Without it
    jax.distributed ends them, within two minutes.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, JaxragError):
            print(f"jaxrag: error: {printable(str(error))}", file=sys.stderr)
        else:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
