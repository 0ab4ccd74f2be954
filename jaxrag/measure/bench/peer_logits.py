"""The transformers side of `jaxrag check`; run by the peer's own interpreter.

Imports torch and transformers and nothing of jaxrag. Reads one JSON line per question from stdin,
{"ids": [...], "out": "FILE.npy"}, writes the logits of all tokens there, float32 [T, V], and
answers {"tokens": T}.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers


def main() -> None:
    """Load the model named on the command line in float32 and answer until stdin closes."""
    (path,) = map(Path, sys.argv[1:])
    transformers.utils.logging.disable_progress_bar()
    is_file = path.is_file()
    kind = {"gguf_file": path.name} if is_file else {"use_safetensors": True}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent if is_file else path,
        dtype=torch.float32,
        attn_implementation="eager",
        **kind,
    ).eval()
    hello = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps(hello), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        with torch.inference_mode():
            logits = model(torch.tensor([question["ids"]])).logits[0]
        np.save(question["out"], logits.float().numpy())
        print(json.dumps({"tokens": len(logits)}), flush=True)


if __name__ == "__main__":
    main()
