"""The transformers side of `bench ttft` and benchmarks/prefill.py; run by the peer's interpreter.

Imports torch and transformers and nothing of jaxrag. Reads one JSON line per measurement from
stdin, {"ids": [...]}, and answers {"seconds": s, "top": id}: a full prefill with SDPA and a KV
cache, logits of the last token only, until the id of the first token is known. {"matmul": n} is
answered by {"flops_per_second": x} of a square product of that side in the model's dtype.
"""

import json
import os
import sys
import time

import torch
import transformers


def main() -> None:
    """Load the model named on the command line and answer until stdin closes."""
    directory, dtype = sys.argv[1:]
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )
    model = model.to(device).eval()
    hello = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "device": device,
    }
    print(json.dumps(hello), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "matmul" in asked:
            peak = matmul_peak(asked["matmul"], model.dtype, device)
            print(json.dumps({"flops_per_second": peak}), flush=True)
            continue
        ids = torch.tensor([asked["ids"]])
        start = time.perf_counter()
        with torch.inference_mode():
            out = model(ids.to(device), use_cache=True, logits_to_keep=1)
            top = int(out.logits[0, -1].argmax())
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "top": top}), flush=True)


def matmul_peak(side: int, dtype: torch.dtype, device: str) -> float:
    """The best of five, after one that is not counted."""
    a = torch.ones(side, side, dtype=dtype, device=device)
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        torch.matmul(a, a)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * side**3 / min(seconds[1:])


if __name__ == "__main__":
    main()
