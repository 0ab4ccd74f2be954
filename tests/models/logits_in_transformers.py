"""Logits of a model directory by transformers; imports nothing of jaxrag.

PEER_PYTHON logits_in_transformers.py DIR IDS.npy LOGITS.npy
"""

import json
import sys

import numpy as np
import torch
import transformers

directory, ids, out = sys.argv[1:]
model, report = transformers.AutoModelForCausalLM.from_pretrained(
    directory, attn_implementation="eager", output_loading_info=True
)
assert not any(report.values()), json.dumps({k: list(v) for k, v in report.items()})
with torch.no_grad():
    found = model(input_ids=torch.from_numpy(np.load(ids)).long(), use_cache=False)
np.save(out, found.logits.float().numpy())
