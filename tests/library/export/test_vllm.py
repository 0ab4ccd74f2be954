"""vLLM goes on from an exported prompt as from its own KV.

Needs the interpreter of an environment with vLLM for CPUs, in VLLM_PYTHON.
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import jaxrag
from jaxrag.base.types import FINAL, FIRST_CHUNK
from jaxrag.kv.store import ChunkStore, chunk_key
from jaxrag.library.export import MANIFEST, Bundle, ExportedChunk, KeyPlacement, export_bundles
from jaxrag.reuse.encode import encode_chunks, provenance

pytestmark = pytest.mark.oracle

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("continue_in_vllm.py")
LENGTHS = (40, 24)  # of the chunks: whole blocks together, as the connector counts
COUNT = 6


def exported(model, chunks, folder):
    """The chunks as one prompt in a file, as a store keeps them."""
    nothing = np.zeros(0, np.int32)
    store = ChunkStore.open(folder / "store", model.fingerprint, model.kv_layout, mode="rw")
    pieces = [None] * len(chunks)
    for i, kv in encode_chunks(model, "isolated", nothing, chunks):
        record = provenance(model, "isolated", nothing, chunks[i])
        key = chunk_key(model.fingerprint, record.content_id, record.context_id)
        store.put(key, kv, record=record)
        pieces[i] = ExportedChunk(key, chunks[i])
    bundle = Bundle("prompt", tuple(pieces))
    export_bundles(store, [bundle], KeyPlacement(model.config, 0), folder / "out")
    (file,) = json.loads((folder / "out" / MANIFEST).read_text())["files"]
    return folder / "out" / file["path"]


def test_the_same_greedy_tokens(tmp_path):
    if "VLLM_PYTHON" not in os.environ:
        pytest.skip("set VLLM_PYTHON to a python with vLLM for CPUs")
    directory = ROOT / "checkpoints" / "synthetic-0.8m" / "dual"
    model = jaxrag.load_model(directory)
    texts = [path.read_text() for path in sorted((ROOT / "examples" / "village").glob("*.md"))]
    said = model.tokenizer.encode(" ".join(texts))
    chunks = np.split(said[: sum(LENGTHS)], np.cumsum(LENGTHS)[:-1])
    final = model.tokenizer.encode("Question: Which animal does Kora Felell keep? Answer:")
    cache = exported(model, chunks, tmp_path)
    (tmp_path / "connector").mkdir()
    case = {
        "model": str(directory),
        "cache": str(cache),
        "next_ids": final.tolist(),
        "count": COUNT,
        "folder": str(tmp_path / "connector"),
    }
    done = subprocess.run(
        [os.environ["VLLM_PYTHON"], SCRIPT], input=json.dumps(case), text=True, capture_output=True
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")] or [
        pytest.fail(done.stderr[-3000:])
    ]
    found = json.loads(line.removeprefix("RESULT"))
    assert found["files"][0] == found["files"][1], "the exported files were not found"

    everything = np.concatenate((said[: sum(LENGTHS)], final))
    lengths = (*LENGTHS, len(final))
    segments = np.repeat([FIRST_CHUNK, FIRST_CHUNK + 1, FINAL], lengths)[None]
    tokens = []
    for masked in (segments, None):  # as the chunks were encoded; with full attention
        ids, scores = everything[None], None
        for _ in range(COUNT):
            mask = None
            if masked is not None:
                more = np.full((1, ids.shape[1] - masked.shape[1]), FINAL)
                mask = np.concatenate((masked, more), axis=1)
            logits = np.asarray(model.logits(ids, segments=mask))[0, -1].astype(np.float64)
            scores = logits - np.log(np.exp(logits).sum()) if scores is None else scores
            ids = np.concatenate((ids, [[logits.argmax()]]), axis=1)
        tokens.append((ids[0, len(everything) :].tolist(), scores[found["tokens"][0]]))
    (blockwise, own), (_, full) = tokens
    assert found["tokens"] == blockwise
    assert found["logprob"] == pytest.approx(own, abs=1e-4)
    assert abs(own - full) > 1e-3  # with KV of its own it would have said something else
