"""Continue generation in transformers from exported caches; run by an interpreter that has it.

Imports torch, transformers and safetensors, and nothing of jaxrag: this is what a reader of the
exported files would write. Reads a JSON list of cases from stdin, each {"model": directory,
"cache": file, "next_ids": tokens that follow the cache, "out": file}, and writes for each an .npz:

    key.{i}, value.{i}    the cache as it was read, [1, K, T, H], as unsigned bits
    logits                [len(next_ids), V] of next_ids behind the cache
    full_logits           [len(next_ids), V] of a prefill of everything, nothing cached
    full_key.{i}          the keys that this prefill made, [1, K, T, H] float32
    generated             greedy tokens behind next_ids, the cache reused
    full_generated        the same without the cache
"""

import json
import sys

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DynamicCache

NEW_TOKENS = 6
BITS = {2: torch.int16, 4: torch.int32}


def read_cache(path):
    """A transformers cache, and the record of the file."""
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        record = json.loads(file.metadata()["jaxrag"])
    cache = DynamicCache()
    for layer in range(record["layout"]["num_layers"]):
        cache.update(tensors[f"layers.{layer}.key"], tensors[f"layers.{layer}.value"], layer)
    return cache, record


def bits(tensor):
    return tensor.view(BITS[tensor.element_size()]).numpy()


def greedy(model, ids, cache):
    """Tokens behind ``ids``; what the cache holds of them is not computed again."""
    generated = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
    )
    return generated[0, ids.shape[1] :].numpy()


@torch.no_grad()
def run(case):
    model = AutoModelForCausalLM.from_pretrained(
        case["model"], attn_implementation="eager", dtype=case["dtype"]
    ).eval()
    cache, record = read_cache(case["cache"])
    out = {}
    for i, layer in enumerate(cache.layers):
        out[f"key.{i}"], out[f"value.{i}"] = bits(layer.keys), bits(layer.values)
    new = torch.tensor([case["next_ids"]])
    everything = torch.cat((torch.tensor([record["token_ids"]]), new), dim=1)
    full = model(everything, use_cache=True)
    out["full_logits"] = full.logits[0, -new.shape[1] :].float().numpy()
    for i, layer in enumerate(full.past_key_values.layers):
        out[f"full_key.{i}"] = layer.keys.float().numpy()
    if record["rope"]["applied"]:
        start = record["rope"]["first_position"] + record["tokens"]
        positions = torch.arange(start, start + new.shape[1])[None]
        after = model(new, past_key_values=cache, position_ids=positions)
        out["logits"] = after.logits[0].float().numpy()
        if record["rope"]["first_position"] == 0:
            cache, _ = read_cache(case["cache"])
            out["generated"] = greedy(model, everything, cache)
            out["full_generated"] = greedy(model, everything, None)
    np.savez(case["out"], **out)


if __name__ == "__main__":
    for case in json.load(sys.stdin):
        run(case)
