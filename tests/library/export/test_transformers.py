"""transformers goes on from exported caches as from its own.

Needs an interpreter with torch, transformers and safetensors: this one, or that of PEER_PYTHON.
"""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from peers import peer_python

import jaxrag
from jaxrag.base.types import FINAL, FIRST_CHUNK, PREFIX
from jaxrag.kv.store import ChunkStore, chunk_key
from jaxrag.library.export import MANIFEST, Bundle, ExportedChunk, KeyPlacement, export_bundles
from jaxrag.models.model import load_model
from jaxrag.reuse.encode import encode_chunks, provenance

pytestmark = pytest.mark.oracle

GOLDENS = Path(__file__).parents[2] / "goldens"
SCRIPT = Path(__file__).with_name("continue_in_transformers.py")
TOLERANCE = {"rtol": 1e-4, "atol": 2e-4}
FLOAT32 = (
    *("llama", "llama_linear", "llama_llama3", "llama_yarn", "mistral_window", "mistral_yarn"),
    *("qwen2", "qwen3", "glm", "glm4"),
)
HALF = ("llama_sharded_bf16", "llama_fp16")
LAYERS = 2
PREFIX_IDS = np.array([1, 9, 30], np.int32)
CHUNKS = [np.arange(3, 14, dtype=np.int32), np.array([44, 8, 8, 31, 2, 50, 17], np.int32)]
QUESTION = np.array([12, 40, 5, 22], np.int32)


def ask_peer(cases):
    """Let the peer work through ``cases``; continue_in_transformers says what they are."""
    done = subprocess.run(
        [peer_python("torch", "transformers", "safetensors"), SCRIPT],
        input=json.dumps(cases),
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr


def export(name, folder):
    """One golden model's chunks, exported alone (as stored; at 0; at 30) and as one prompt."""
    model = load_model(GOLDENS / name)
    fingerprint, layout = model.fingerprint, model.kv_layout
    store = ChunkStore.open(folder / "store", fingerprint, layout, mode="rw")
    parts = [PREFIX_IDS, *CHUNKS]
    pieces, kv = [None] * 3, [None] * 3
    for i, array in encode_chunks(model, "isolated", PREFIX_IDS[:0], parts):
        record = provenance(model, "isolated", PREFIX_IDS[:0], parts[i])
        key = chunk_key(fingerprint, record.content_id, record.context_id)
        store.put(key, array, record=record)
        pieces[i], kv[i] = ExportedChunk(key, parts[i]), array
    alone, prompt = Bundle("chunk", (pieces[1],)), Bundle("prompt", tuple(pieces))
    for label, bundle, first in (
        ("stored", alone, None),
        ("at-0", alone, 0),
        ("at-30", alone, 30),
        ("prompt", prompt, 0),
    ):
        placement = KeyPlacement(model.config, first)
        report = export_bundles(store, [bundle], placement, folder / name / label)
        assert (report.files, report.refused) == (1, ())
        yield label, folder / name / label / "chunks" / f"{bundle.name}.safetensors"
    np.savez(folder / name / "kv.npz", bits=kv[1].view(layout.bits_dtype))
    positions = np.arange(sum(map(len, parts)) + len(QUESTION))[None]
    segments = np.repeat(
        [PREFIX, FIRST_CHUNK, FIRST_CHUNK + 1, FINAL], [*map(len, parts), len(QUESTION)]
    )
    ids = np.concatenate((*parts, QUESTION))[None]
    logits = model.logits(ids, positions, segments[None])[0, -len(QUESTION) :]
    np.save(folder / name / "prompt.npy", np.asarray(logits))


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """``answers(name, label)``: what transformers made of an export of a golden model."""
    folder = tmp_path_factory.mktemp("peer")
    cases = []
    for name in (*FLOAT32, *HALF):
        dtype = json.loads((GOLDENS / name / "config.json").read_text())["dtype"]
        for label, file in export(name, folder):
            cases.append(
                {
                    "model": str(GOLDENS / name),
                    "dtype": dtype,
                    "cache": str(file),
                    "next_ids": QUESTION.tolist(),
                    "out": str(folder / name / f"{label}.npz"),
                }
            )
    ask_peer(cases)

    def answer(name, label):
        with np.load(folder / name / f"{label}.npz") as arrays:
            return dict(arrays), folder / name

    return answer


@pytest.mark.parametrize("name", [*FLOAT32, *HALF])
def test_torch_reads_the_bits_of_the_store(answers, name):
    found, folder = answers(name, "stored")
    with np.load(folder / "kv.npz") as arrays:
        bits = arrays["bits"]
    for layer in range(LAYERS):
        for which, part in enumerate(("key", "value")):
            wanted = bits[layer, which].swapaxes(0, 1)[None]
            np.testing.assert_array_equal(found[f"{part}.{layer}"].view(wanted.dtype), wanted)


@pytest.mark.parametrize("name", [name for name in FLOAT32 if name != "mistral_window"])
def test_the_keys_are_those_of_its_own_prefill(answers, name):
    found, _ = answers(name, "at-0")
    for layer in range(LAYERS):
        keys, own = found[f"key.{layer}"].view(np.float32), found[f"full_key.{layer}"]
        np.testing.assert_allclose(keys, own[:, :, : len(CHUNKS[0])], **TOLERANCE)


@pytest.mark.parametrize("label", ["at-0", "at-30"])
@pytest.mark.parametrize("name", FLOAT32)
def test_one_chunk_goes_on_as_a_full_prefill(answers, name, label):
    found, _ = answers(name, label)
    np.testing.assert_allclose(found["logits"], found["full_logits"], **TOLERANCE)


@pytest.mark.parametrize("name", FLOAT32)
def test_a_prompt_goes_on_as_the_block_mask_says(answers, name):
    found, folder = answers(name, "prompt")
    wanted = np.load(folder / "prompt.npy")
    np.testing.assert_allclose(found["logits"], wanted, **TOLERANCE)
    assert not np.allclose(found["full_logits"], wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", FLOAT32)
def test_it_generates_the_same_tokens_with_and_without_the_cache(answers, name):
    found, _ = answers(name, "at-0")
    assert found["generated"][0] == found["full_logits"][-1].argmax()
    np.testing.assert_array_equal(found["generated"], found["full_generated"])


@pytest.mark.parametrize("name", HALF)
def test_half_precision_stays_close(answers, name):
    found, _ = answers(name, "at-0")
    ours, theirs = (log_softmax(found[key]) for key in ("logits", "full_logits"))
    divergence = (np.exp(theirs) * (theirs - ours)).sum(axis=-1)
    assert divergence.max() < 0.01


def test_the_prompt_of_a_question_gets_the_same_answer(text_model, model_dir, tmp_path):
    question = "Who works the salt wells?"
    texts = ["The salt wells are worked by hand.", "Tea bricks were traded for salt."]
    with jaxrag.KnowledgeBase.open(tmp_path / "kb", model=text_model) as kb:
        kb.add(texts)
        ours = jaxrag.generate(question, kb=kb, method="turborag", k=2, max_new_tokens=6)
        kb.export(tmp_path / "out", question=question, k=2)
    (file,) = json.loads((tmp_path / "out" / MANIFEST).read_text())["files"]
    assert len(file["chunks"]) == 3  # the prefix and two chunks
    case = {
        "model": str(model_dir),
        "dtype": "float32",
        "cache": str(tmp_path / "out" / file["path"]),
        "next_ids": file["final_ids"],
        "out": str(tmp_path / "out.npz"),
    }
    ask_peer([case])
    with np.load(tmp_path / "out.npz") as arrays:
        theirs = arrays["generated"].tolist()
    assert len(ours.token_ids) == 6
    assert theirs == list(ours.token_ids)


def log_softmax(x):
    x = x.astype(np.float64)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
