"""`jaxrag train`: a training run from a TOML file; beside it the training of a primer."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrag.cli import train_primer
from jaxrag.cli.command import SUMMARIES, Args, argument, command, flag, value, values
from jaxrag.cli.options import JSON, distributed_options, join
from jaxrag.cli.output import give, human_count, table

if TYPE_CHECKING:
    from jaxrag.train.config import TrainConfig
    from jaxrag.train.loop import Report

TERMINATED = 143  # 128 + SIGTERM: a scheduler starts the same command again, with --resume


def run(args: Args) -> int:
    """Exit code 0 when the run (or its first --steps) is done, 143 when SIGTERM ended it."""
    import jax

    from jaxrag.base.errors import ConfigError
    from jaxrag.train.config import load_config
    from jaxrag.train.loop import train

    config = load_config(args.config, args.set)
    if args.steps is not None and args.steps < 1:
        raise ConfigError(f"--steps {args.steps}: expected a positive integer")
    if args.dry_run:
        return _dry_run(args, config)
    join(args)
    from jaxrag.models.compiled import keep_compiled

    keep_compiled()
    report = train(
        config,
        args.out or Path("runs") / Path(args.config).stem,
        resume=args.resume,
        stop_after=args.steps,
        progress=not args.json,
    )
    if jax.process_index() == 0:
        give(args, report, _lines(report))
    return TERMINATED if report.stopped == "terminated" else 0


def _lines(report: "Report") -> Iterator[str]:
    loss = "" if report.loss is None else f", loss {report.loss:.4f}"
    yield (
        f"{report.stopped} at step {report.step}{loss}; {human_count(report.tokens)} tokens in "
        f"{report.seconds:.0f} s, {human_count(report.tokens / report.seconds)} tokens/s"
    )
    if report.packing_efficiency is not None:
        yield f"rows were {report.packing_efficiency:.1%} full"
    yield from (f"skipped {n} samples of {name}" for name, n in report.skipped.items() if n)
    for what, directory in (("last weights", report.model), ("best weights", report.best)):
        if directory is not None:
            yield f"{what}: {directory}"


def _dry_run(args: Args, config: "TrainConfig") -> int:
    """Print the cost; reads sizes only, no weights and no data."""
    from jaxrag.train.cost import estimate
    from jaxrag.train.start import model_config

    cost = estimate(config, model_config(config, planned=True))
    more = {"device_bytes": cost.device_bytes, "h100_hours": cost.h100_hours}
    gib = 2**30
    rows = [
        ["parameters", human_count(cost.params)],
        ["trained", human_count(cost.trained_params)],
        ["tokens a step, at most", human_count(cost.tokens_per_step)],
        ["tokens in all", human_count(cost.tokens)],
        ["FLOPs a step, at most", human_count(cost.flops_per_step)],
        ["FLOPs in all", human_count(cost.flops)],
        ["GPU hours (H100 at 40 %)", f"{cost.h100_hours:.3g}"],
        ["memory of a device, GiB", f"{cost.device_bytes / gib:.3g}"],
        ["  weights", f"{cost.weight_bytes / gib:.3g}"],
        ["  optimizer", f"{cost.optimizer_bytes / gib:.3g}"],
        ["  gradients", f"{cost.gradient_bytes / gib:.3g}"],
        ["  activations", f"{cost.activation_bytes / gib:.3g}"],
    ]
    give(args, dataclasses.asdict(cost) | more, [table(rows, right=(1,))])
    return 0


COMMAND = command(
    "train",
    run,
    SUMMARIES["train"],
    "jaxrag train configs/train/turborag-qwen2-7b.toml --out runs/turborag --resume",
    argument(
        "config",
        "CONFIG",
        "a .toml file as in configs/train; or the word primer, see `jaxrag train primer --help`",
    ),
    value("--out", "DIR", "folder of the run (runs/NAME of the config)"),
    flag("--resume", "go on where the run in --out stopped"),
    value("--steps", "N", "stop after step N (all)", type=int),
    values(
        "--set", "KEY=VALUE", "replace a setting, such as optimizer.learning_rate=1e-4; repeatable"
    ),
    flag("--dry-run", "print sizes and estimated cost, train nothing"),
    distributed_options("one process of a run on many hosts; see scripts/cluster"),
    JSON,
)
COMMAND.beside["primer"] = train_primer.COMMAND
