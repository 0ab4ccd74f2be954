"""Record the first losses of configs/train/shipped.toml, for tests/train/test_shipped.py.

300 steps, two minutes on two CPU cores.

example: python scripts/make_shipped_loss.py
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

from jaxrag.train.config import RunPart, TrainConfig, load_config
from jaxrag.train.log import METRICS_FILE, read_metrics
from jaxrag.train.loop import train

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "configs/train/shipped.toml"
EVERY = 10
STEPS = 300
OUT = ROOT / "tests" / "goldens" / "shipped_loss.json"


def main() -> int:
    """Run the steps and write, per line of the log, the step and its losses."""
    summary, _, example = (__doc__ or "").partition("\n\nexample: ")
    parser = argparse.ArgumentParser(description=summary, epilog=f"example: {example.strip()}")
    parser.add_argument("--out", type=Path, default=OUT, help="(tests/goldens/shipped_loss.json)")
    args = parser.parse_args()
    config = shortened(load_config(ROOT / CONFIG))
    with tempfile.TemporaryDirectory() as folder:
        train(config, folder, stop_after=STEPS)
        lines = read_metrics(Path(folder) / METRICS_FILE)
    names = ("step", "loss", "response_loss", "context_loss")
    record = [{name: line[name] for name in names} for line in lines]
    args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{args.out}: loss {record[0]['loss']:.4f} -> {record[-1]['loss']:.4f}")
    return 0


def shortened(config: TrainConfig) -> TrainConfig:
    """The same steps with a line every ten of them, without checkpoints and evaluation."""
    return dataclasses.replace(config, run=RunPart(log_every=EVERY, save_every=0), eval=())


if __name__ == "__main__":
    sys.exit(main())
