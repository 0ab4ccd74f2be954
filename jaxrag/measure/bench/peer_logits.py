"""The transformers side of `jaxrag check`; run by the peer's own interpreter.

Imports torch and transformers and nothing of jaxrag. Reads one JSON line per question from stdin,
{"ids": [...], "out": "FILE.npy"}, writes the logits of all tokens there, float32 [T, V], and
answers {"tokens": T}.
"""

import json
import sys

import numpy as np
import torch
import transformers


def main() -> None:
    """Load the model named on the command line in float32 and answer until stdin closes."""
    (directory,) = sys.argv[1:]
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", use_safetensors=True
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
