"""vLLM itself over stored chunks: `make test-vllm VLLM_PYTHON=...`.

VLLM_PYTHON is the interpreter of an environment with vLLM's CPU build and what the store needs.
JAXRAG_VLLM_QUESTIONS sets the questions of a comparison (25).
"""

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import random_cases

import jaxrag
from jaxrag.base.config import Llama3Scaling, YarnScaling
from jaxrag.measure.zoo import SMALL_LLAMA
from jaxrag.models.export import convert
from jaxrag.serve.connector import write_connector

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]
COUNT = int(os.environ.get("JAXRAG_VLLM_QUESTIONS", "25"))
CONFIG = dataclasses.replace(
    SMALL_LLAMA, num_layers=4, vocab_size=512, mlp_dim=512, max_positions=4096
)
SCALED = {
    "llama3": Llama3Scaling(8.0, 1.0, 4.0, 256),
    "yarn": YarnScaling(4.0, 1024, 32.0, 1.0, 1.1386294361119891, True),
}


def scaled(name):
    return dataclasses.replace(CONFIG, rope=dataclasses.replace(CONFIG.rope, scaling=SCALED[name]))


def command(folder, job, script="in_vllm.py", **variables):
    """How vLLM's interpreter is started on a job."""
    if "VLLM_PYTHON" not in os.environ:
        pytest.skip("set VLLM_PYTHON to a python with vLLM for CPUs")
    path = Path(folder) / "job.json"
    path.write_text(json.dumps({"folder": str(folder), **job}))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    words = [os.environ["VLLM_PYTHON"], Path(__file__).with_name(script), path]
    return {"args": words, "env": environment}


def result(done):
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")] or [
        pytest.fail(done.stderr[-3000:])
    ]
    return json.loads(line.removeprefix("RESULT"))


def run(folder, steps, **job):
    """What vLLM says to the steps of a job."""
    started = command(folder, {"steps": steps, **job})
    return result(subprocess.run(**started, capture_output=True, text=True))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    data = random_cases.make(folder, CONFIG, questions=COUNT, lengths=(20, 160))
    same = sum(a == b for a, b in zip(data["stored"], data["full"], strict=True))
    assert same <= COUNT // 10, "answers tell nothing if both ways give them"
    return folder, data


def test_parity_salts_and_processes(made):
    folder, data = made
    how = ["exact", "spans", "recognised"]
    steps = [{"how": it, "reset": True} for it in how]
    steps += [{"how": it, "reset": True, "batch": True} for it in how]
    steps += [{"how": it, "batch": True} for it in ("exact", "spans", "exact", "spans")]
    found = run(folder, steps)
    for step, said in zip(steps, found["steps"], strict=True):
        assert said["tokens"] == data["full" if step["how"] == "exact" else "stored"], step
    lengths = [37 + sum(len(data["chunks"][at]) for at in it["chunks"]) for it in data["cases"]]
    assert found["steps"][1]["cached"] == lengths  # all that is stored, and nothing more
    assert not found["jax"]
    assert not found["catalog"]


def test_two_workers(made):
    folder, data = made
    steps = [{"how": how, "batch": True} for how in ("spans", "exact")]
    found = run(folder, steps, engine={"tensor_parallel_size": 2})
    assert [said["tokens"] for said in found["steps"]] == [data["stored"], data["full"]]


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (CONFIG, {"encoder": "after_prefix"}),
        (CONFIG, {"stored": "int8"}),
        (CONFIG, {"stored": "int4"}),
        (scaled("llama3"), {}),
        (scaled("yarn"), {}),
        (dataclasses.replace(CONFIG, family="qwen3", qk_norm=True), {}),
    ],
    ids=["after_prefix", "int8", "int4", "llama3", "yarn", "qwen3"],
)
def test_parity_of(tmp_path, config, options):
    data = random_cases.make(tmp_path, config, questions=COUNT, lengths=(20, 120), **options)
    found = run(tmp_path, [{"how": "spans", "batch": True}, {"how": "exact", "batch": True}])
    assert [said["tokens"] for said in found["steps"]] == [data["stored"], data["full"]]


def test_bfloat16(tmp_path):
    """Roundings differ: first tokens' probabilities are near, and answers agree as often."""
    count = max(COUNT, 100)
    data = random_cases.make(
        tmp_path, dataclasses.replace(CONFIG, dtype="bfloat16"), questions=count, lengths=(20, 120)
    )
    steps = [{"how": how, "batch": True, "logprobs": 20} for how in ("spans", "exact")]
    found = run(tmp_path, steps, engine={"dtype": "bfloat16"})["steps"]
    equal = []
    for said, name in zip(found, ("stored", "full"), strict=True):
        ours = zip(data[name], data[f"{name}_firsts"], said["firsts"], strict=True)
        apart = [abs(first.get(str(ids[0]), -99) - logprob) for ids, logprob, first in ours]
        equal.append(sum(a == b for a, b in zip(said["tokens"], data[name], strict=True)))
        print(name, max(apart), equal[-1])
        assert np.quantile(apart, 0.99) <= 0.05
        assert max(apart) <= 0.06
    assert equal[0] >= equal[1] - count // 20


def knowledge_base(tmp_path):
    """A converted checkpoint, its model for vLLM, and a knowledge base of examples/village."""
    source = ROOT / "checkpoints" / "synthetic-0.8m" / "dual"
    convert(source, tmp_path / "orbax", "jaxrag")
    convert(tmp_path / "orbax", tmp_path / "model", "huggingface")
    model = jaxrag.load_model(tmp_path / "orbax")
    kb = jaxrag.KnowledgeBase.open(tmp_path / "kb", model=model)
    kb.add([path for path in sorted((ROOT / "examples" / "village").glob("*.md"))])
    return model, kb


@pytest.mark.parametrize("how", ["spans", "recognised"])
def test_what_prompts_wanted_is_warm_after_the_command(tmp_path, how):
    """A part that no document has is computed, noted, encoded by the command, and then loaded."""
    model, kb = knowledge_base(tmp_path)
    write_connector(kb, tmp_path / "manifest", serve=tmp_path / "model")
    prefix, pasted = kb.template.prefix_ids(model.tokenizer), "The mill of Orsk burned down."
    chunks = [kb.template.chunk_ids(model.tokenizer, model.tokenizer.encode(pasted), "News")]
    question = "Where does Kora Felell live?"
    for hit in kb.template.arrange(kb.search(question, k=2)):
        chunks.append(kb.template.chunk_ids(model.tokenizer, hit.ids, hit.title))
    final = kb.template.final_ids(model.tokenizer, question).tolist()
    cases = [{"chunks": list(range(len(chunks))), "final": final}]
    given = {"prefix": prefix.tolist(), "chunks": [it.tolist() for it in chunks], "cases": cases}
    (tmp_path / "cases.json").write_text(json.dumps(given))
    job = {"engine": {"max_model_len": 512}, "extra": {"wanted_bytes": 10_000}}
    [cold] = run(tmp_path, [{"how": how}], **job)["steps"]
    report = write_connector(kb, tmp_path / "manifest", serve=tmp_path / "model")
    assert (report.noted, report.encoded, report.missing) == (1, 1, 0)
    [warm] = run(tmp_path, [{"how": how}], **job)["steps"]
    ours = {
        method: random_cases.answered(model, kb.store, method, prefix, chunks, cases)[0]
        for method in ("full_attention", "turborag")
    }
    kb.close()
    assert cold["cached"] == [0]
    assert cold["tokens"][0][: len(ours["full_attention"])] == ours["full_attention"]
    assert warm["cached"] == [len(prefix) + sum(len(it) for it in chunks)]
    assert warm["tokens"][0][: len(ours["turborag"])] == ours["turborag"]
