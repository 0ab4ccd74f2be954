"""Arguments that several commands share."""

import os
import re
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

from jaxrag.base.config import ModelOptions
from jaxrag.base.errors import RequestError
from jaxrag.cli.command import Args, Parameter, argument, fields, flag, value, values
from jaxrag.engine.sampling_params import SamplingParams
from jaxrag.serve.ask import Ask

if TYPE_CHECKING:
    from jaxrag.tasks.synthetic import SyntheticTask

SECRET_VARIABLE = "JAXRAG_SECRET_FILE"  # in the environment: a path, never a secret
REMEMBERED = "the one that the knowledge base remembers"  # --model, where it is left out
MEET_SECONDS = 300.0  # in which all processes come together, before they read a model
_LONGEST_RUN = 30 * 86_400  # seconds that the first process to end waits for the last

JSON = flag("--json", "print one JSON object")
KB = argument("kb", "DIR", "folder of the knowledge base")
SECRET = value(
    "--secret-file",
    "FILE",
    "file of the secret that seals the KV of --kb, 16 random bytes or more (the file that "
    f"{SECRET_VARIABLE} names)",
)
[WHERE] = fields(Ask, only=("where",))
FOUND = fields(Ask, only=("k", "where"))
GENERATION = [*fields(Ask), *fields(SamplingParams)]
PEER = [
    value("--peer", None, "measure this one beside ours", choices=("transformers",)),
    value("--peer-python", "FILE", "interpreter that imports the peer (this one)"),
]
TASK = [
    value("--chunks", "N|N-M", "documents of a question, as 6 or 4-6 (6)", "6"),
    value("--split", None, "(test)", "test", choices=("test", "train")),
    values("--set", "KEY=VALUE", "another setting of the task, such as relations=4; repeatable"),
]


def model_options(
    unset: str = REMEMBERED, *, use: str = "", required: bool = False, kv: bool = False
) -> list[Parameter]:
    """--model and ModelOptions.

    Args:
      unset: what is meant without --model.
      use: what it is for, where that is not plain.
    """
    text = f"{use}{'; ' * bool(use)}a directory, a GGUF file, or ORG/NAME of the hub ({unset})"
    of_model = value("--model", "MODEL", text, required=required)
    return [of_model, *fields(ModelOptions, but=() if kv else ("kv",))]


def result_options(*, markdown: bool = False) -> list[Parameter]:
    """--out and --json, and --markdown."""
    tables = [value("--markdown", "FILE", "also write the tables there")] * markdown
    return [value("--out", "FILE", "also write the JSON result there"), *tables, JSON]


def distributed_options(
    what: str = "one model on the devices of all processes (--mesh 1,1,N of N devices)",
) -> list[Parameter]:
    """Options that ``join`` reads; ``what`` is the help of --distributed."""
    return [
        flag("--distributed", what),
        value("--coordinator", "HOST:PORT", "of process 0, where needed"),
        value("--processes", "N", "how many, where needed", type=int),
        value("--process-id", "I", "which one, where needed", type=int),
    ]


def peer_of(args: Args) -> str | None:
    """The interpreter of the peer; None without --peer. RequestError for one without the other."""
    if args.peer_python and not args.peer:
        raise RequestError("--peer-python without --peer; add --peer transformers")
    return (args.peer_python or sys.executable) if args.peer else None


def task_of(args: Args) -> "SyntheticTask":
    """What ``TASK`` says. RequestError or ConfigError for what is no task."""
    from jaxrag.base.tables import build, override
    from jaxrag.tasks.synthetic import SyntheticTask

    task: dict[str, Any] = {"chunks": chunks_of(args.chunks), "split": args.split}
    for assignment in args.set:
        task = override(task, assignment)
    return build(SyntheticTask, task, "the task")


def chunks_of(text: str) -> list[int]:
    """Fewest and most chunks of --chunks, such as 6 or 4-6."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None:
        raise RequestError(f"--chunks {text}: expected a number such as 6, or 4-6")
    return [int(match[1]), int(match[2] or match[1])]


def join(args: Args) -> bool:
    """Join jax.distributed where --distributed says so; returns whether it did.

    Slurm, Open MPI and TPU pods are known to JAX; anybody else names coordinator, number and rank.
    A process that the others do not join within a while ends, with one line and exit code 1: JAX
    itself would end it by a signal.

    Raises RequestError when it cannot join, or for one of those flags without --distributed.
    """
    given = (args.coordinator, args.processes, args.process_id)
    if not args.distributed:
        if given != (None, None, None):
            raise RequestError("--coordinator, --processes and --process-id need --distributed")
        return False
    import jax

    if args.process_id == 0 and args.coordinator is not None:
        _claim(args.coordinator)
    alone = threading.Timer(MEET_SECONDS, _end_alone, [args.processes])
    alone.daemon = True
    alone.start()
    try:
        jax.distributed.initialize(
            *given,
            initialization_timeout=int(2 * MEET_SECONDS + 60),
            shutdown_timeout_seconds=_LONGEST_RUN,
        )
        came = jax.process_count()  # waits for the devices of all
    except (RuntimeError, ValueError) as error:
        raise RequestError(
            f"jax.distributed cannot start ({' '.join(str(error).split())[:200]}); pass "
            "--coordinator, --processes and --process-id"
        ) from None
    finally:
        alone.cancel()
    if args.processes not in (None, came):
        raise RequestError(
            f"--processes {args.processes}: the first process counts {came}; start all with the "
            "same number"
        )
    return True


def _claim(coordinator: str) -> None:
    """Refuse a coordinator's port that another program, or another process 0, has.

    JAX listens beside another that listens at the same port, and both wait for the others.
    """
    port = coordinator.rpartition(":")[2]
    taken = RequestError(
        f"--coordinator {coordinator}: its port is taken, by another process 0 or another program; "
        "give each process its own --process-id, or name a free port"
    )
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise RequestError(f"--coordinator {coordinator}: expected HOST:PORT")
    try:
        socket.create_server(("", int(port))).close()
        if sys.platform == "linux":  # two that begin at once both find the port free
            claim = socket.socket(socket.AF_UNIX)
            claim.bind(f"\0jaxrag-coordinator-{port}")
            claim.detach()  # held until this process ends
    except OSError:
        raise taken from None


def _end_alone(processes: int | None) -> None:
    others = "the others" if processes is None else f"all {processes} processes"
    print(
        f"jaxrag: error: jax.distributed cannot start: {others} did not come within "
        f"{MEET_SECONDS:g} s; start all of them, with one --coordinator and the same --processes",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)
