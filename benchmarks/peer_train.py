"""The transformers side of `train_step.py`; run by the peer's own interpreter.

Imports torch and transformers and nothing of jaxrag. Reads one JSON line per measurement from
stdin, {"ids": [[...]], "segments": [[...]] or null}, and answers {"seconds": s, "loss": x}: one
training step in float32 with SDPA: forward, next-token loss, backward, clip to 1, AdamW. Segments
ask for the block mask, which torch takes as a dense T x T array; making it is not timed.
"""

import json
import os
import sys
import time

import torch
import transformers


def main() -> None:
    """Load the model named on the command line and train it until stdin closes."""
    directory, rate = sys.argv[1], float(sys.argv[2])
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="sdpa"
    )
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, fused=True)
    hello = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "device": device,
    }
    print(json.dumps(hello), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        ids = torch.tensor(asked["ids"], device=device)
        mask = None if asked["segments"] is None else block_mask(asked["segments"], device)
        _synchronise(device)
        start = time.perf_counter()
        loss = model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        value = float(loss.detach())
        _synchronise(device)
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "loss": value}), flush=True)


def block_mask(segments: list[list[int]], device: str) -> torch.Tensor:
    """Additive [B, 1, T, T]: same segment or final block (2), never later."""
    rows = torch.tensor(segments, device=device)
    see = (rows[:, :, None] == rows[:, None, :]) | (rows[:, :, None] == 2)
    see &= torch.ones(see.shape[1:], dtype=torch.bool, device=device).tril()
    return torch.where(see, 0.0, float("-inf"))[:, None]


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
