"""What transformers makes of SmolLM2-135M-Instruct: logits and greedy answers, for tests/real.

Nothing of jaxrag is imported here. Run it where torch, transformers, gguf and accelerate are, after
`make real` and, for the ids, `jaxrag convert .cache/models/SmolLM2-135M-Instruct.Q4_1.gguf FOLDER`:

    python scripts/make_real_goldens.py .cache/models/SmolLM2-135M-Instruct.Q4_1.gguf FOLDER

The tokenizer is the folder's: the converter of transformers does not know the pre-tokenizer that
the file names, and takes numbers apart otherwise.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "tests" / "goldens" / "smollm2.json"
PROMPTS, NEW_TOKENS, PLACES = 20, 24, 32


def main() -> None:
    """Write the goldens."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="the GGUF file")
    parser.add_argument("folder", type=Path, help="with its tokenizer")
    args = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model.parent, gguf_file=args.model.name, dtype=torch.float32
    ).eval()
    chapters = sorted((ROOT / "examples" / "handbook").glob("*.md"))
    lines = (ROOT / "examples" / "handbook-questions.jsonl").read_text("utf-8").splitlines()
    places = np.linspace(0, model.config.vocab_size - 1, PLACES).astype(int)
    rows = []
    for line, chapter in zip(lines[:: len(lines) // PROMPTS], chapters, strict=False):
        question, text = json.loads(line)["question"], chapter.read_text("utf-8")[:1200]
        messages = [{"role": "user", "content": f"{text}\n\nQuestion: {question}"}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        with torch.no_grad():
            found = model(torch.tensor([ids])).logits[0, -1].numpy()
            answer = model.generate(
                torch.tensor([ids]), do_sample=False, max_new_tokens=NEW_TOKENS
            )[0, len(ids) :].tolist()
        rows.append(
            {
                "messages": messages,
                "ids": ids,
                "logits": [round(float(x), 4) for x in found[places]],
                "answer": answer,
            }
        )
    about = {"transformers": transformers.__version__, "torch": torch.__version__}
    OUT.write_text(json.dumps({"about": about, "places": places.tolist(), "rows": rows}) + "\n")
    print(f"{OUT}: {len(rows)} prompts of {min(len(r['ids']) for r in rows)} tokens and more")


if __name__ == "__main__":
    main()
