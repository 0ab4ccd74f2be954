"""What transformers makes of pretrained models, logits and greedy answers, for tests/real.

Nothing of jaxrag is imported here. Run it where torch, transformers, gguf and accelerate are, after
`make real` and, for the ids of the first, `jaxrag convert` of that file to FOLDER:

    python scripts/make_real_goldens.py .cache/models/SmolLM2-135M-Instruct.Q4_1.gguf FOLDER
    python scripts/make_real_goldens.py .cache/models/gemma-3-270m-q4_k_m.gguf

Without a folder the tokenizer is the file's. Of SmolLM2 it is the folder's: the converter of
transformers does not know the pre-tokenizer that the file names, and takes numbers apart otherwise.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
OUT = {"SmolLM2": "smollm2.json", "gemma-3": "gemma3-270m.json"}  # by how a file's name begins
PROMPTS, NEW_TOKENS, PLACES = 20, 24, 32
LONG, SHORT = 2600, 400  # characters; without a template every fifth is longer than any window


def asked(tokenizer: Any, number: int, text: str, question: str) -> dict[str, Any]:
    """A prompt and its ids: one user message, or plain text where the model knows no chat."""
    if tokenizer.chat_template is None:
        text = text[: SHORT if number % 5 else LONG]
        text = f"{text}\n\nQuestion: {question}\nAnswer:"
        return {"text": text, "ids": tokenizer(text)["input_ids"]}
    messages = [{"role": "user", "content": f"{text[:1200]}\n\nQuestion: {question}"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    return {"messages": messages, "ids": ids}


def main() -> None:
    """Write the goldens."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="the GGUF file")
    parser.add_argument("folder", type=Path, nargs="?", help="with its tokenizer")
    args = parser.parse_args()
    out = next(name for start, name in OUT.items() if args.model.name.startswith(start))
    file = {"gguf_file": args.model.name}
    tokenizer = (
        transformers.AutoTokenizer.from_pretrained(args.folder)
        if args.folder
        else transformers.AutoTokenizer.from_pretrained(args.model.parent, **file)
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model.parent, dtype=torch.float32, **file
    ).eval()
    chapters = sorted((ROOT / "examples" / "handbook").glob("*.md"))
    lines = (ROOT / "examples" / "handbook-questions.jsonl").read_text("utf-8").splitlines()
    places = np.linspace(0, model.config.vocab_size - 1, PLACES).astype(int)
    rows = []
    pairs = zip(lines[:: len(lines) // PROMPTS], chapters, strict=False)
    for number, (line, chapter) in enumerate(pairs):
        row = asked(tokenizer, number, chapter.read_text("utf-8"), json.loads(line)["question"])
        ids = torch.tensor([row["ids"]])
        with torch.no_grad():
            found = model(ids, logits_to_keep=1).logits[0, -1].numpy()
            answer = model.generate(ids, do_sample=False, max_new_tokens=NEW_TOKENS)
        row["logits"] = [round(float(x), 4) for x in found[places]]
        rows.append({**row, "answer": answer[0, ids.shape[1] :].tolist()})
    about = {"transformers": transformers.__version__, "torch": torch.__version__}
    path = ROOT / "tests" / "goldens" / out
    path.write_text(json.dumps({"about": about, "places": places.tolist(), "rows": rows}) + "\n")
    sizes = sorted(len(row["ids"]) for row in rows)
    print(f"{path}: {len(rows)} prompts of {sizes[0]} to {sizes[-1]} tokens")


if __name__ == "__main__":
    main()
