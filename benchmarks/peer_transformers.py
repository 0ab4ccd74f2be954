"""The transformers side of `decode_throughput.py` and `train_step.py`, run by its interpreter.

Imports torch and transformers and nothing of jaxrag. Reads one JSON line per measurement from
stdin, and answers with one.

decode DIR DTYPE: {"ids": [...], "rows": B, "tokens": n, "cache": "dynamic" or "static"}, answered
by {"seconds": s, "ids": [...]}: ``generate`` of n tokens in each of B rows, greedy, with SDPA,
behind the same prompt; the ids of the first row, from that which follows the prompt. The prompt is
run once and its KV copied to every row; neither is timed.

train DIR RATE: {"ids": [[...]], "segments": [[...]] or null}, answered by {"seconds": s, "loss":
x}: one training step in float32 with SDPA: forward, next-token loss, backward, clip to 1, AdamW.
Segments ask for the block mask, which torch takes as a dense T x T array; making it is not timed.
"""

import json
import os
import sys
import time
from typing import Any

import torch
import transformers


class Prefilled:
    """The KV of one prompt, and the token that follows it."""

    def __init__(self, model: transformers.PreTrainedModel, ids: list[int]) -> None:
        self.prompt = ids
        self.cache = transformers.DynamicCache()
        tokens = torch.tensor([ids], device=model.device)
        out = model(tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.first = int(out.logits[0, -1].argmax())

    def rows(
        self, model: transformers.PreTrainedModel, kind: str, rows: int, tokens: int
    ) -> transformers.Cache:
        """A cache of that kind with a copy for every row, and room for ``tokens`` more."""
        if kind == "static":
            room = len(self.prompt) + tokens + 1
            cache = transformers.StaticCache(config=model.config, max_cache_len=room)
        else:
            cache = transformers.DynamicCache()
        for index, layer in enumerate(self.cache.layers):
            k, v = (x.expand(rows, -1, -1, -1) for x in (layer.keys, layer.values))
            cache.update(k, v, index)
        return cache


def main() -> None:
    """Load the model named on the command line and answer until stdin closes."""
    task, directory, setting = sys.argv[1:]
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, setting) if task == "decode" else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="sdpa"
    ).to(device)
    hello = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "device": device,
    }
    print(json.dumps(hello), flush=True)
    if task == "decode":
        decode(model.eval())
    else:
        train(model.train(), float(setting))


def decode(model: transformers.PreTrainedModel) -> None:
    """Answer with seconds and ids."""
    model.generation_config.eos_token_id = None  # exactly so many tokens
    model.generation_config.pad_token_id = 0
    prefilled = None
    with torch.inference_mode():
        for line in sys.stdin:
            asked = json.loads(line)
            if prefilled is None or prefilled.prompt != asked["ids"]:
                prefilled = None  # its memory, before the next is made
                prefilled = Prefilled(model, asked["ids"])
            print(json.dumps(measure(model, prefilled, asked)), flush=True)


def measure(
    model: transformers.PreTrainedModel, prefilled: Prefilled, asked: dict[str, Any]
) -> dict[str, Any]:
    """Time one ``generate``."""
    rows, tokens = asked["rows"], asked["tokens"]
    cache = prefilled.rows(model, asked["cache"], rows, tokens)
    ids = torch.tensor([[*prefilled.prompt, prefilled.first]], device=model.device)
    ids = ids.expand(rows, -1).contiguous()
    mask = torch.ones_like(ids)
    synchronise(model.device)
    start = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=mask,
        past_key_values=cache,
        max_new_tokens=tokens,
        do_sample=False,
        use_cache=True,
    )
    synchronise(model.device)
    seconds = time.perf_counter() - start
    new = out[0, len(prefilled.prompt) :].tolist()
    if len(new) != tokens + 1:
        raise RuntimeError(f"generate gave {len(new) - 1} tokens where {tokens} were asked for")
    return {"seconds": seconds, "ids": new}


def train(model: transformers.PreTrainedModel, rate: float) -> None:
    """Answer with seconds and loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, fused=True)
    for line in sys.stdin:
        asked = json.loads(line)
        ids = torch.tensor(asked["ids"], device=model.device)
        mask = None if asked["segments"] is None else block_mask(asked["segments"], model.device)
        synchronise(model.device)
        start = time.perf_counter()
        loss = model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        value = float(loss.detach())
        synchronise(model.device)
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "loss": value}), flush=True)


def block_mask(segments: list[list[int]], device: torch.device) -> torch.Tensor:
    """Additive [B, 1, T, T]: same segment or final block (2), never later."""
    rows = torch.tensor(segments, device=device)
    see = (rows[:, :, None] == rows[:, None, :]) | (rows[:, :, None] == 2)
    see &= torch.ones(see.shape[1:], dtype=torch.bool, device=device).tril()
    return torch.where(see, 0.0, float("-inf"))[:, None]


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
