"""Go on from an exported prompt in vLLM, through its example connector; run by its interpreter.

Imports vLLM, torch and safetensors, and nothing of jaxrag. Reads one JSON object from stdin,
{"model": directory, "cache": file, "next_ids": tokens behind the cache, "count": tokens to
generate, "folder": an empty folder}, and prints {"tokens": [...], "logprob": of the first,
"files": of the connector before, and after} on a line of its own that begins with RESULT.

The connector keeps one file a layer, ``<md5 of the token ids, int64>/<layer>.safetensors``, with a
tensor ``kv_cache`` of whole blocks: as many rows as tokens, in the layout of the attention backend.
On the CPU in float32 a block of 32 tokens of one head is K transposed, then V.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.config import KVTransferConfig

BLOCK = 32  # tokens; the CPU's attention takes no smaller one


def place(cache, folder):
    """Write an exported prompt as the connector's files; returns its token ids."""
    with safe_open(cache, "pt") as file:
        record = json.loads(file.metadata()["jaxrag"])
    tensors, ids = load_file(cache), record["token_ids"]
    assert len(ids) % BLOCK == 0
    named = hashlib.md5(torch.tensor(ids).numpy().tobytes()).hexdigest()
    (folder / named).mkdir()
    for layer in range(record["layout"]["num_layers"]):
        key, value = (tensors[f"layers.{layer}.{name}"][0] for name in ("key", "value"))
        heads, tokens, dim = key.shape
        blocks = (heads, tokens // BLOCK, BLOCK, dim)
        both = torch.stack((key.reshape(blocks).mT.reshape(blocks), value.reshape(blocks)), 2)
        rows = both.reshape(heads, tokens, 2 * dim).transpose(0, 1).contiguous()
        path = folder / named / f"model.layers.{layer}.self_attn.attn.safetensors"
        save_file({"kv_cache": rows}, path)
    return ids


def main():
    case = json.load(sys.stdin)
    folder = Path(case["folder"])
    ids = place(case["cache"], folder) + case["next_ids"]
    before = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.safetensors"))
    settings = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(folder)},
    )
    model = LLM(
        case["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        block_size=BLOCK,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        kv_transfer_config=settings,
    )
    greedy = SamplingParams(
        temperature=0, max_tokens=case["count"], ignore_eos=True, detokenize=False, logprobs=1
    )
    (answer,) = model.generate(TokensPrompt(prompt_token_ids=ids), greedy)[0].outputs
    tokens = list(answer.token_ids)
    after = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.safetensors"))
    result = {"tokens": tokens, "logprob": answer.logprobs[0][tokens[0]].logprob}
    print("RESULT" + json.dumps({**result, "files": [before, after]}), flush=True)


if __name__ == "__main__":
    main()
