"""llama.cpp itself over stored chunks of SmolLM2: the laws, a user's way, and what may go wrong.

It needs llama-cpp-python beside the weights of `make real`: pip install 'jaxrag[llama_cpp]'.
"""

import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import jaxrag
from jaxrag.base.errors import EngineError
from jaxrag.base.types import FINAL, PREFIX
from jaxrag.measure.evals.gate import kl_divergence

pytest.importorskip("llama_cpp")

ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
HANDBOOK = ROOT / "examples" / "handbook"
CHAPTERS = [HANDBOOK / name for name in sorted(os.listdir(HANDBOOK))[4:6]]
CLOSE = 1e-3  # KL of two ways to the same token

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not MODEL.is_file(), reason="no weights: `make real` fetches them"),
]


@pytest.fixture(scope="module")
def model():
    return jaxrag.load_model(MODEL, engine="llama_cpp")


@pytest.fixture(scope="module", params=["float32", "Q4_1"])
def worker(request, tmp_path_factory):
    """llama.cpp in this very process, on the weights as they are and as float32.

    With blocks of 4 bits its products round what they multiply to 8 bits, so that two ways to the
    same token differ by more than with float32.
    """
    import llama_cpp as lib

    from jaxrag.base.llama_cpp.worker import Worker

    path, close = MODEL, 0.01
    if request.param == "float32":
        path, close = tmp_path_factory.mktemp("weights") / "model.gguf", CLOSE
        asked = lib.llama_model_quantize_default_params()
        asked.ftype, asked.allow_requantize = 0, True
        assert not lib.llama_model_quantize(str(MODEL).encode(), str(path).encode(), asked)
    made = Worker(str(path), "f16", 2048, 2, 1)
    made.close_enough = close
    yield made
    path.unlink() if path != MODEL else None


@pytest.fixture(scope="module")
def parts(model):
    """A prefix, three chunks and a question, as ids."""
    encode = model.text_tokenizer().encode
    text = CHAPTERS[0].read_text(encoding="utf-8")
    chunks = [encode(text[at : at + 400]) for at in (0, 900, 1800)]
    prefix = encode("<|im_start|>user\nYou answer from the documents.\n")
    return prefix, chunks, encode("\nWho decides?<|im_end|>\n<|im_start|>assistant\n")


def behind(worker, final, place):
    logits = np.zeros((1, worker.vocab_size), np.float32)
    worker.step([(0, place, final, True)], logits)
    return logits


def restored(worker, prefix, chunks, final, before):
    """The logits behind a prompt whose chunks are put back, read behind ``before``."""
    worker.leave(0)
    worker.restore(0, worker.encode(prefix[:0], prefix), 0, 0)
    place = len(prefix)
    for ids in chunks:
        worker.restore(0, worker.encode(before, ids), len(before), place)
        place += len(ids)
    return behind(worker, final, place)


def by_hand(worker, prefix, chunks, final, before):
    """The same mask, and nothing saved or moved: each chunk is read at its place in the prompt.

    In a row of its own, behind ``before``, which stands right in front of it there and leaves then.
    """
    import llama_cpp as lib

    memory = worker._memory
    for row in (0, 1):
        worker.leave(row)
    worker.step([(0, 0, prefix, False)], None)
    place = len(prefix)
    for ids in chunks:
        runs = [(1, place - len(before), before, False)] * bool(len(before))
        worker.step([*runs, (1, place, ids, False)], None)
        lib.llama_memory_seq_rm(memory, 1, 0, place)
        lib.llama_memory_seq_cp(memory, 1, 0, -1, -1)
        worker.leave(1)
        place += len(ids)
    return behind(worker, final, place)


@pytest.fixture(scope="module")
def ours():
    """Our engine on the dequantised weights."""
    return jaxrag.load_model(MODEL, dtype="float32")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
@pytest.mark.parametrize("sees_prefix", [False, True])
def test_law_2(worker, ours, parts, order, sees_prefix):
    prefix, chunks, final = parts
    chunks = [chunks[at] for at in order]
    before = prefix if sees_prefix else prefix[:0]
    found = restored(worker, prefix, chunks, final, before)
    wanted = by_hand(worker, prefix, chunks, final, before)
    assert kl_divergence(wanted, found)[0] <= worker.close_enough
    if sees_prefix:  # in our packed forward chunks would see it from their places in the prompt
        return
    segments = np.repeat([PREFIX, 3, 4, 5, FINAL], [len(it) for it in (prefix, *chunks, final)])
    ids = np.concatenate([prefix, *chunks, final])
    [logits] = ours.logits(ids[None], None, segments[None], prefix_visible=False)
    assert kl_divergence(np.asarray(logits)[-1:], found)[0] <= 10 * worker.close_enough


def test_one_chunk_in_its_place_is_full_attention(worker, parts):
    prefix, [chunk, *_], final = parts
    found = restored(worker, prefix, [chunk], final, prefix)
    worker.leave(0)
    whole = behind(worker, np.concatenate([prefix, chunk, final]), 0)
    assert kl_divergence(whole, found)[0] <= worker.close_enough


def test_cold_is_warm(model, tmp_path):
    """Law 16: what was stored before changes no token, nor its probability."""
    question, told = "Who decides about a leave?", []
    with jaxrag.KnowledgeBase.open(tmp_path, model=model, chunk_tokens=128) as kb:
        kb.add(jaxrag.read_paths(CHAPTERS))
        for _ in range(2):
            for forgets in (False, True):
                if forgets:
                    kb.store.delete(list(kb.store.keys()))
                    model.engine.forget()
                found = jaxrag.generate(question, kb=kb, k=4, max_new_tokens=12)
                told.append(found.token_ids)
                assert bool(found.counts["encoded"]) == forgets
    assert told.count(told[0]) == 4


def test_two_hundred_requests_of_eight_threads(model):
    """Each finds its own year: sums round by who decodes beside, but that is far from a tie."""
    names = ["bridge", "tower", "school", "mill", "harbour", "church", "library", "station"]
    years = {name: str(1801 + 17 * at) for at, name in enumerate(names)}
    told = [f"The old {name} of Varnholm was built in {years[name]}." for name in names]

    def ask(at):
        name = names[at % len(names)]
        question = f"In which year was the old {name} of Varnholm built?"
        text = jaxrag.generate(
            question, documents=[told[names.index(name)]], model=model, method="full_reuse",
            max_new_tokens=16, batch_size=8,
        ).text  # fmt: skip
        return [year for year in years.values() if year in text]

    alone = [ask(at) for at in range(len(names))]
    assert alone == [[year] for year in years.values()]  # the model can
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(ask, range(200)))
    assert found == alone * 25


def test_flipped_states_are_never_served(model, tmp_path):
    """500 times a bit of a stored chunk is flipped: the answer stays the same."""
    rng, question = random.Random(0), "Who decides about a leave?"
    with jaxrag.KnowledgeBase.open(tmp_path, model=model, chunk_tokens=64) as kb:
        kb.add(jaxrag.read_paths(CHAPTERS[:1]))
        keys = sorted(kb.store.keys())
        wanted = {key: kb.store.get(key).copy() for key in keys}
        files = [it for it in (tmp_path / "kv").rglob("*") if it.is_file()]
        files = [it for it in files if it.stat().st_size > 100_000]
        assert len(files) >= len(keys)
        found, refused_ = 0, 0
        for _ in range(500):
            path = rng.choice(files)
            at, bit = rng.randrange(path.stat().st_size), 1 << rng.randrange(8)
            with open(path, "r+b") as file:
                file.seek(at)
                [byte] = file.read(1)
                file.seek(at)
                file.write(bytes([byte ^ bit]))
            read = kb.store.get_many(keys, on_missing="skip")
            for key, (start, length) in read.offsets.items():
                assert np.array_equal(read.kv[:, :, start : start + length], wanted[key])
            found += len(read.offsets)
            refused_ += len(read.refused)
            with open(path, "r+b") as file:
                file.seek(at)
                file.write(bytes([byte]))
        assert refused_ > 400 and found
        before = jaxrag.generate(question, kb=kb, k=3, max_new_tokens=8)
        for path in files:
            with open(path, "r+b") as file:
                file.seek(path.stat().st_size // 2)
                [byte] = file.read(1)
                file.seek(-1, 1)
                file.write(bytes([byte ^ 16]))
        model.engine.forget()
        after = jaxrag.generate(question, kb=kb, k=3, max_new_tokens=8)
        assert after.text == before.text and after.counts["encoded"]


def test_a_killed_process_costs_its_requests_alone(model):
    """Its own rows get one error; the next request starts another process."""
    asked = {"documents": ["The bridge was built in 1873."], "model": model}
    before = jaxrag.generate("When was it built?", **asked, max_new_tokens=6)
    stream = jaxrag.generate("When was it built?", **asked, max_new_tokens=200, stream=True)
    next(stream)
    [(process, _)] = model.backend.process._started
    process.kill()
    with pytest.raises(EngineError, match="llama.cpp ended with SIGKILL"):
        list(stream)
    assert jaxrag.generate("When was it built?", **asked, max_new_tokens=6).text == before.text


def test_ingest_survives_a_kill(tmp_path):
    """Killed amid ingest, asked to go on: nothing is lost and what was stored is not read again."""
    command = [sys.executable, "-m", "jaxrag", "ingest", *map(str, CHAPTERS), "--kb",
               str(tmp_path / "kb"), "--model", str(MODEL), "--engine", "llama_cpp",
               "--chunk-tokens", "64", "--json"]  # fmt: skip
    first = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    while first.poll() is None and len(list((tmp_path / "kb").glob("kv/*/*/*"))) < 3:
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    verify = [sys.executable, "-m", "jaxrag", "kb", "verify", str(tmp_path / "kb")]
    subprocess.run(verify, cwd=ROOT, check=True, capture_output=True)
    with jaxrag.KnowledgeBase.open(tmp_path / "kb") as kb:
        assert kb.engine == "llama_cpp" and kb.stats()["chunks"] > 10
