"""A pretrained model on a GPU: SmolLM2-135M-Instruct, checked, then taught to read blocks.

What a machine without a network lacks is brought along in a folder (`--real FOLDER`): the GGUF of
`make real`, whole or in pieces (`split -b 48M FILE FILE.`) that may come in several calls, and the
files of DATA. Behind them all is kept in WORK, and the next call goes on there.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
from gpu_train import LEAVE, TOY, held_out, terminated_after

ROOT = Path(__file__).parents[1]
WORK = ROOT / "runs" / "lora-distill"  # as the config has it
CONFIG = "lora-distill-smollm2"  # of configs/train
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
GOLDENS = ROOT / "tests" / "goldens" / "smollm2.json"
NEAR = 2e-3  # that logits may be away from the goldens, as on a CPU
# Data set, its file, questions that are left out before, and that are taken, passages of a prompt.
DATA = {
    "nq_open": ("nq-open-oracle.jsonl", 300, 2155, 5),
    "hotpotqa": ("hotpotqa_train.json", 40, 60, 4),
    "musique": ("musique_train.json", 40, 60, 4),
}
HELD_OUT = ("nq_open", 2455, 64, 5)


def brought(folder: Path, name: str = MODEL) -> Path:
    """A file of the folder in WORK, put together from its pieces where it is in some."""
    path = WORK / name
    pieces = sorted(folder.glob(f"{name}*"))
    if not path.exists():
        if not pieces:
            raise FileNotFoundError(f"--real {folder}: no {name}, nor pieces of it")
        WORK.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".part").open("wb") as file:
            for piece in pieces:
                with piece.open("rb") as source:
                    shutil.copyfileobj(source, file)
        path.with_suffix(".part").replace(path)
    return path


def stage_smollm2(folder: Path, impl: str, found: MutableMapping[str, Any]) -> None:
    """Logits and greedy answers beside transformers' goldens, in float32 by every body."""
    import jax

    from jaxrag.engine.engine import engine_of
    from jaxrag.engine.request import Prompt, Request
    from jaxrag.models.model import load_model
    from jaxrag.reuse.methods import METHODS

    goldens, right = json.loads(GOLDENS.read_text(encoding="utf-8")), True
    path = brought(folder)
    for body in dict.fromkeys(("xla", impl)):
        with jax.default_matmul_precision("highest"):
            model = load_model(path, dtype="float32", kernels=body)
            engine, away, same = engine_of(model), 0.0, 0
            for row in goldens["rows"]:
                ids = np.array(row["ids"], np.int32)
                logits = np.asarray(model.logits(ids[None]))[0, -1, goldens["places"]]
                away = max(away, float(np.abs(logits - row["logits"]).max()))
                prompt = Prompt(ids[:0], (), ids)
                asked = Request(
                    prompt, engine.memory, METHODS["full_attention"], len(row["answer"])
                )
                same += [it for told in engine.iterate([asked]) for it in told.new] == row["answer"]
        count = len(goldens["rows"])
        found[f"logits, {body}"] = {"ok": away <= NEAR, "out": away}
        found[f"equal answers of {count}, {body}"] = {"share": same / count}
        right = right and away <= NEAR and same == count
    found["ok"] = right


def stage_adapters(
    folder: Path, seconds: float, tiny: bool, found: MutableMapping[str, Any]
) -> None:
    """Packets and LoRA by KL to its own full attention; then how near both come."""
    from jaxrag.train.config import load_config
    from jaxrag.train.loop import train

    end, path = time.monotonic() + seconds, brought(folder)
    data = {name: str(brought(folder, file)) for name, (file, *_) in DATA.items()}
    for words in _rows(data, str(path), tiny):
        _run([sys.executable, str(ROOT / "scripts" / "own_answers.py"), *words], end - LEAVE)
    packets, jaxrag = WORK / "packets.safetensors", [sys.executable, "-m", "jaxrag"]
    steps = "2" if tiny else "600"
    _run(
        [*jaxrag, "train", "primer", "--form", "packets", "--vectors", "16", "--resume", "--steps",
         steps, "--batch", "1" if tiny else "8", "--dataset", "nq_open", "--data", data["nq_open"],
         "--passages", "5", "--template", "chat", "--skip", "300", "--num", "4" if tiny else "2000",
         "--num-held-out", "2" if tiny else "32", "--model", str(path), "--dtype", "float32",
         "--out", str(packets)],
        end - LEAVE,
    )  # fmt: skip
    config = load_config(CONFIG, TOY[1:] if tiny else ())
    with terminated_after(end - time.monotonic() - LEAVE):
        report = train(config, WORK / "run", resume=True, progress=False)
    found["run"] = {
        "seconds": report.seconds, "tokens_per_second": report.tokens / report.seconds,
        "stopped": report.stopped, "step": report.step, "of_steps": config.optimizer.steps,
        "loss": report.loss, "tokens": report.tokens,
    }  # fmt: skip
    for name, value in held_out(WORK / "run").items():
        found[name] = value
    if report.stopped != "finished":
        return
    near = [*jaxrag, "eval", "near", "nq_open", "--data", data["nq_open"], "--passages", "5",
            "--template", "chat", "--dtype", "float32", "--num",
            "2" if tiny else "100"]  # fmt: skip
    arms = {
        "adapters": ["--model", str(report.model), "--reference", str(path), "--method",
                     "full_attention", "--method", "full_reuse", "--method", "turborag"],
        "packets": ["--model", str(path), "--method", "full_reuse", "--method", "packets",
                    "--primer", str(packets)],
    }  # fmt: skip
    for arm, words in arms.items():
        out = WORK / f"near-{arm}.json"
        _run([*near, *words, "--out", str(out)], end)
        for row in json.loads(out.read_text(encoding="utf-8"))["rows"]:
            found[f"KL, {arm}, {row['method']}"] = row["kl"]


def _rows(data: dict[str, str], model: str, tiny: bool) -> Iterator[list[str]]:
    """Words for scripts/own_answers.py, which goes on where it stopped."""
    asked = {name: (name, *numbers) for name, (_, *numbers) in DATA.items()}
    for out, (name, skip, count, passages) in (asked | {"held_out": HELD_OUT}).items():
        yield [name, "--data", data[name], "--model", model, "--skip", str(skip), "--num",
               "2" if tiny else str(count), "--out", str(WORK / f"{out}.jsonl"),
               "--passages", str(passages)]  # fmt: skip


def _run(command: list[str], end: float) -> None:
    """A command that goes on in the next call where time is over now."""
    subprocess.run(command, check=True, timeout=max(end - time.monotonic(), 1), cwd=ROOT)
