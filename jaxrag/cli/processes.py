"""One program in several processes that hold one model: joining them, and ending all of them."""

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Iterator

from jaxrag.base.errors import JaxragError
from jaxrag.cli.options import join
from jaxrag.models.text.printable import printable


@contextlib.contextmanager
def joined(args: argparse.Namespace) -> Iterator[bool]:
    """Join the other processes, if there are any; yields whether this is the first.

    Without --mesh the model lies over all devices, by heads.
    """
    if not join(args):
        yield True
        return
    import jax

    with _ending_all():
        if args.mesh is None:
            args.mesh = f"1,1,{jax.device_count()}"
        yield jax.process_index() == 0


@contextlib.contextmanager
def _ending_all() -> Iterator[None]:
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
