"""Plain llama.cpp on a GGUF file, for `llama_cpp_reuse.py`: imports nothing but it and NumPy.

    python peer_llama_file.py FILE PROMPT TOKENS FLASH

Prints the milliseconds of a token, mean of so many behind a prompt of so many tokens, greedy;
FLASH: 1 and 0 are flash attention and none, -1 is as it comes.
"""

import ctypes
import os
import sys
import time
from collections.abc import Sequence

import llama_cpp as lib
import numpy as np

path, prompt, tokens, flash = sys.argv[1], *map(int, sys.argv[2:])
silent = lib.llama_log_callback(lambda level, text, data: None)
lib.llama_log_set(silent, ctypes.c_void_p(0))
model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
asked = lib.llama_context_default_params()
asked.n_ctx, asked.n_batch, asked.flash_attn_type = prompt + tokens + 64, prompt, flash
asked.n_threads = asked.n_threads_batch = len(os.sched_getaffinity(0))
context = lib.llama_init_from_model(model, asked)
size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
batch = lib.llama_batch_init(prompt, 0, 1)


def step(ids: Sequence[int], place: int) -> int:
    """The likeliest token behind these."""
    batch.n_tokens = len(ids)
    for at, token in enumerate(ids):
        batch.token[at], batch.pos[at] = token, place + at
        batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
        batch.logits[at] = at == len(ids) - 1
    assert not lib.llama_decode(context, batch)
    logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, len(ids) - 1), (size,))
    return int(logits.argmax())


token = step([(1000 + at) % (size - 1) for at in range(prompt)], 0)
start = time.perf_counter()
for at in range(tokens):
    token = step([token], prompt + at)
print(1e3 * (time.perf_counter() - start) / tokens)
