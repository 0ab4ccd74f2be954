"""``reading.toml``: how the weights of a directory were trained to read prompts with chunks.

Training writes it beside the weights, and it is copied wherever the tokenizer goes. A directory
without it was trained with full attention, as far as anybody knows: every stock model is one. Who
fine-tuned a model elsewhere writes the file by hand: ``block_positions = ["reordered"]``.
"""

import dataclasses
import json
from pathlib import Path

from jaxrag.base.tables import build, read_toml
from jaxrag.models.segments import PositionScheme
from jaxrag.models.text.tokenizer import READING_FILE


@dataclasses.dataclass(frozen=True)
class Reading:
    """Positions of chunks under which the weights were trained to read them block-wise.

    Block-wise: no chunk sees another (TurboRAG section 3.3, Block-Attention section 2.4). Empty:
    trained with full attention only.
    """

    block_positions: tuple[PositionScheme, ...] = ()


def read_reading(directory: str | Path) -> Reading:
    """What the directory says; nothing where it has no such file. Raises ConfigError."""
    path = Path(directory) / READING_FILE
    return build(Reading, read_toml(path), str(path)) if path.is_file() else Reading()


def write_reading(directory: str | Path, reading: Reading) -> None:
    """Write ``reading.toml``."""
    text = f"block_positions = {json.dumps(reading.block_positions)}\n"
    (Path(directory) / READING_FILE).write_text(text, encoding="utf-8")
