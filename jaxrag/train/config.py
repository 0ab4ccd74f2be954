"""Everything that decides a training run, as one frozen description read from a TOML file.

Paths are relative to the working directory, and of configs/ where that has none to the package's
(``installed.located``). ``[run]`` and the mesh may change when a run is
resumed; everything else is part of what makes its result.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from jaxrag.base.errors import ConfigError
from jaxrag.base.installed import config_names, config_path
from jaxrag.base.tables import build, flatten, override, read_toml
from jaxrag.models.reading import Reading
from jaxrag.models.segments import PositionScheme
from jaxrag.tasks.synthetic import SyntheticTask

SampleMode = Literal["full", "block", "both"]
OnBad = Literal["fail", "skip"]
LoraTarget = Literal["q", "k", "v", "o", "gate", "up", "down"]


@dataclasses.dataclass(frozen=True)
class ModelPart:
    """``[model]``: where the weights come from.

    ``path`` is a model directory to start from. Without it the weights are random, drawn from
    ``seed``, in the sizes of ``config``, a TOML file as in configs/models. Beside ``path`` that
    file says the sizes before the directory is there, which is all that a dry run needs.
    ``tokenizer`` is a directory, by default ``path``. ``max_positions`` is the context that the
    model is trained to have, instead of the one it has. ``made_by`` is what makes ``path``, named
    where it is missing.
    """

    path: str | None = None
    made_by: str | None = None
    config: str | None = None
    tokenizer: str | None = None
    max_positions: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse no start."""
        if self.path is None and self.config is None:
            raise ConfigError("[model]: expected path or config")
        if self.path is None and self.tokenizer is None:
            raise ConfigError("[model]: config needs tokenizer, a directory with tokenizer.json")
        if self.max_positions is not None and self.max_positions < 1:
            raise ConfigError(f"[model]: max_positions={self.max_positions}: expected above 0")


@dataclasses.dataclass(frozen=True)
class SourcePart:
    """``[[data.sources]]``: local files, or generated samples, and their share of the mixture.

    Attributes:
      name: for messages.
      weight: relative share of the samples drawn.
      paths: .jsonl and .parquet files.
      made_by: what makes them, named where one is missing.
      synthetic: the task to draw samples of, instead of files.
      mode: instead of ``data.mode``.
      block_share: share of the single-turn samples that are trained as ``mode`` says; the others in
        full mode (Block-Attention keeps 45 %). Dialogues of several turns are always trained so.
      full_only: a sample that holds one of these texts is trained in full mode (code, there).
      first_step: the source takes part from here on.
      last_step: up to here, not included.
    """

    name: str
    weight: float = 1.0
    paths: tuple[str, ...] = ()
    made_by: str | None = None
    synthetic: SyntheticTask | None = None
    mode: SampleMode | None = None
    block_share: float = 1.0
    full_only: tuple[str, ...] = ()
    first_step: int = 0
    last_step: int | None = None

    def __post_init__(self) -> None:
        """Refuse a source without samples or with an impossible share."""
        if bool(self.paths) == (self.synthetic is not None):
            raise ConfigError(f"source {self.name!r}: expected either paths or synthetic")
        if not self.weight > 0 or not 0 <= self.block_share <= 1:
            raise ConfigError(
                f"source {self.name!r}: weight={self.weight}, block_share={self.block_share}: "
                "expected a positive weight and a share from 0 to 1"
            )


@dataclasses.dataclass(frozen=True)
class DataPart:
    """``[data]``: what one step reads.

    Attributes:
      row_tokens: T, tokens of a packed row.
      rows: B, rows of one step over all devices and accumulated parts.
      samples: at most so many samples a step (the batch size of the papers), one in both modes
        counting twice; None = as many as fit.
      template: prompt format (prompts.TEMPLATES or a .toml file) of rows in our own shape.
      positions: of chunks in block mode; full mode is always reordered.
      mode: "both" puts every sample into the batch twice, once per mode.
      response_start: text before every response, such as a space after "Answer:".
      refusal: the response to a question whose ``answers`` are an empty list.
      bad_rows: malformed rows and empty responses.
      too_long: samples beyond a row or the context.
    """

    row_tokens: int
    rows: int
    sources: tuple[SourcePart, ...]
    samples: int | None = None
    template: str = "turborag"
    positions: PositionScheme = "reordered"
    mode: SampleMode = "block"
    response_start: str = ""
    refusal: str = "The documents do not contain the answer."
    bad_rows: OnBad = "fail"
    too_long: OnBad = "fail"
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes below one and sources of one name."""
        if min(self.row_tokens, self.rows, self.samples or 1) < 1 or not self.sources:
            raise ConfigError(
                f"[data]: row_tokens={self.row_tokens}, rows={self.rows}, samples={self.samples}, "
                f"{len(self.sources)} sources: expected positive numbers"
            )
        names = [source.name for source in self.sources]
        if len(set(names)) < len(names):
            raise ConfigError(f"[data]: source names {', '.join(names)}: expected distinct ones")

    @property
    def reading(self) -> Reading:
        """What a model that was trained on this has learnt to read."""
        blocks = any(
            (source.mode or self.mode) != "full" and source.block_share for source in self.sources
        )
        return Reading((self.positions,) if blocks else ())


@dataclasses.dataclass(frozen=True)
class LossPart:
    """``[loss]``: cross-entropy of the responses, or their distance from full attention.

    Attributes:
      objective: "labels" is cross-entropy; "distill" the KL divergence, at the tokens of responses,
        of each mode from what the frozen weights say under full attention.
      reduction: "mean" over the step's response tokens, or their "sum" (Block-Attention's code).
      lm_weight: weight of the same loss on the tokens of chunks and questions; 0 = responses only.
      logits_tokens: tokens whose [V] logits exist at once.
    """

    objective: Literal["labels", "distill"] = "labels"
    reduction: Literal["mean", "sum"] = "mean"
    lm_weight: float = 0.0
    logits_tokens: int = 4096

    def __post_init__(self) -> None:
        """Refuse what has no teacher: a chunk that is read alone is not to be as in full mode."""
        if self.objective == "distill" and self.lm_weight:
            raise ConfigError(f"[loss]: lm_weight={self.lm_weight}: objective 'distill' takes 0")


@dataclasses.dataclass(frozen=True)
class OptimizerPart:
    """``[optimizer]``: AdamW; norms and biases do not decay. ``clip_norm`` 0 does not clip.

    ``residual_rate`` multiplies the learning rate of ``o`` and ``down``, which write into the
    residual stream. Adam moves every weight by the same amount, whatever the size of the stream;
    from random weights the stream is small, and they drown the tokens at the rate of the others.
    """

    steps: int
    learning_rate: float
    warmup_steps: int = 0
    decay: Literal["linear", "cosine", "constant"] = "linear"
    final_share: float = 0.0  # of the learning rate, at the last step
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    residual_rate: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a schedule that cannot be."""
        if self.steps < 1 or not 0 <= self.warmup_steps <= self.steps:
            raise ConfigError(
                f"[optimizer]: steps={self.steps}, warmup_steps={self.warmup_steps}: expected a "
                "positive number and at most as many warm-up steps"
            )
        if self.residual_rate <= 0:
            raise ConfigError(f"[optimizer]: residual_rate={self.residual_rate}: expected above 0")
        if self.learning_rate <= 0 or self.clip_norm < 0 or not 0 <= self.final_share <= 1:
            raise ConfigError(
                f"[optimizer]: learning_rate={self.learning_rate}, clip_norm={self.clip_norm}, "
                f"final_share={self.final_share}: not usable"
            )


@dataclasses.dataclass(frozen=True)
class LoraPart:
    """``[lora]``: train W + (alpha / rank) A B with W frozen; merged on export."""

    rank: int
    alpha: float
    targets: tuple[LoraTarget, ...] = ("q", "k", "v", "o")

    def __post_init__(self) -> None:
        """Refuse an empty adapter."""
        if self.rank < 1 or not self.targets:
            raise ConfigError(f"[lora]: rank={self.rank}, targets={self.targets}: expected some")


@dataclasses.dataclass(frozen=True)
class ComputePart:
    """``[compute]``: arithmetic and devices.

    Attributes:
      dtype: of activations and of the weights as they are multiplied; masters are float32.
      remat: what the backward pass computes again: "none" (on the CPU what is elementwise, which
        is faster there than to keep it); "attention" keeps what attention put out and computes the
        rest of a layer again; "dots" keeps that and every product with a weight; "full" keeps the
        layers' inputs only.
      accumulate: parts that a step's rows are computed in, one after the other.
      data: devices of the mesh along this axis.
      fsdp: the same.
      tensor: the same.
    """

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    remat: Literal["none", "dots", "attention", "full"] = "none"
    accumulate: int = 1
    data: int = 1
    fsdp: int = 1
    tensor: int = 1


@dataclasses.dataclass(frozen=True)
class RunPart:
    """``[run]``: what is written down and how often, in steps; 0 is never.

    ``best`` names the metric whose best checkpoint is kept beside the last ``keep``, such as
    "held_out/accuracy"; a name that ends in "loss" is better when it is lower.
    """

    log_every: int = 10
    save_every: int = 500
    keep: int = 2
    eval_every: int = 0
    best: str | None = None
    tensorboard: bool = False


@dataclasses.dataclass(frozen=True)
class EvalPart:
    """``[[eval]]``: held-out samples, read in one mode; loss and exact match are measured."""

    name: str
    paths: tuple[str, ...] = ()
    synthetic: SyntheticTask | None = None
    mode: Literal["full", "block"] = "block"
    positions: PositionScheme = "reordered"
    samples: int = 256
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """A training run."""

    model: ModelPart
    data: DataPart
    optimizer: OptimizerPart
    loss: LossPart = LossPart()
    compute: ComputePart = ComputePart()
    lora: LoraPart | None = None
    run: RunPart = RunPart()
    eval: tuple[EvalPart, ...] = ()

    def __post_init__(self) -> None:
        """Refuse parts that contradict each other."""
        c, rows = self.compute, self.data.rows
        ways = c.accumulate * c.data * c.fsdp
        if min(c.accumulate, c.data, c.fsdp, c.tensor) < 1 or rows % ways:
            raise ConfigError(
                f"data.rows={rows} is not a multiple of accumulate={c.accumulate} x "
                f"data={c.data} x fsdp={c.fsdp}"
            )
        if self.loss.objective == "distill" and self.lora is None:
            raise ConfigError("loss.objective='distill' needs [lora]: the frozen weights teach")
        if self.run.best is not None and self.run.eval_every == 0:
            raise ConfigError(f"run.best={self.run.best!r} needs run.eval_every")
        modes = {source.mode or self.data.mode for source in self.data.sources}
        if "both" in modes and min(rows, self.data.samples or 2) < 2:
            raise ConfigError(
                f"data.rows={rows}, data.samples={self.data.samples}: mode 'both' puts each sample "
                "into a step twice and needs at least 2 of each"
            )


def load_config(path: str | Path, assignments: Sequence[str] = ()) -> TrainConfig:
    """Read a TOML file, with ``a.b=c`` assignments in place of its values. Raises ConfigError.

    ``path`` may be the name of one of configs/train, such as "turborag-qwen2-7b".
    """
    file = config_path(str(path), "train")
    if file is None:
        names = ", ".join(config_names("train"))
        raise ConfigError(f"{path}: expected the path of a .toml file or one of {names}")
    values = read_toml(file)
    for assignment in assignments:
        values = override(values, assignment)
    return build(TrainConfig, values, Path(path).name)


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """Plain JSON-able form."""
    return dict(json.loads(json.dumps(dataclasses.asdict(config))))


_MAY_CHANGE = ("run.", "compute.data", "compute.fsdp", "compute.tensor", "eval.")


def changed_field(before: dict[str, Any], config: TrainConfig) -> str | None:
    """The first setting, as ``name: old -> new``, that differs and may not; None when none does."""
    known = build(TrainConfig, before, "run.json")  # what it lacks has its default
    old, new = flatten(to_dict(known)), flatten(to_dict(config))
    for name in sorted(old | new):
        if old.get(name) != new.get(name) and not name.startswith(_MAY_CHANGE):
            return f"{name}: {old.get(name)!r} -> {new.get(name)!r}"
    return None
