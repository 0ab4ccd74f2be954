"""lm-evaluation-harness on SmolLM2: through `jaxrag serve` what its own transformers backend says.

It takes an environment with ``lm-eval[api]==0.4.13 torch transformers gguf``, whose python the
environment variable ``LM_EVAL_PYTHON`` names. Its two tasks are made here, of the handbook. No
text of theirs has two spaces before a digit: of a GGUF file transformers reads those as two tokens,
llama.cpp and jaxrag as one, as the model was trained.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
HARNESS = os.environ.get("LM_EVAL_PYTHON", "")
QUESTIONS = 12
NEAR = 1e-3  # nats that a continuation may be away from transformers'
TASKS = {
    "chosen": """
task: chosen
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{[right, wrong]}}"
doc_to_target: 0
""",
    "written": """
task: written
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{right}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 16, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not MODEL.is_file(), reason="no weights: `make real` fetches them"),
    pytest.mark.skipif(not HARNESS, reason="LM_EVAL_PYTHON names no environment with lm-eval"),
]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    lines = (ROOT / "examples" / "handbook-questions.jsonl").read_text("utf-8").splitlines()
    asked = [it for it in map(json.loads, lines) if it["answers"]][:QUESTIONS]
    rows = []
    for at, question in enumerate(asked):
        page = (ROOT / "examples" / "handbook" / question["sources"][0]).read_text("utf-8")
        rows.append({
            "text": f"{page[:1200]}\n\nQuestion: {question['question']}\nAnswer:",
            "right": question["answers"][0], "wrong": asked[at - 1]["answers"][0],
        })  # fmt: skip
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text.replace("DATA", str(data)), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    path = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "jaxrag", "serve", "--model", str(MODEL), "--dtype", "float32",
               "--name", "smol", "--port", "0", "--no-warm-up"]  # fmt: skip
    with path.open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
        try:
            found = None
            while found is None or httpx.get(f"{found}/health").status_code != 200:
                assert server.poll() is None, path.read_text()
                words = path.read_text().split()
                found = next((it.rstrip("/;") for it in words if it.startswith("http://")), None)
                time.sleep(0.2)
            yield found
        finally:
            server.terminate()
            server.wait(60)


def samples(tasks, out, *arguments):
    """What the harness got for each question of each task."""
    subprocess.run(
        [HARNESS, "-m", "lm_eval", "run", *arguments, "--tasks", *TASKS, "--include_path", tasks,
         "--output_path", tasks / out, "--log_samples", "--batch_size", "1"],
        check=True, cwd=tasks, env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    found = {}
    for name in TASKS:
        [file] = (tasks / out).glob(f"**/samples_{name}_*.jsonl")
        lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        found[name] = {line["doc_id"]: line["resps"] for line in lines}
    return found


def test_the_server_equals_transformers(tasks, url):
    address = f"model=smol,base_url={url}/v1/completions,tokenizer_backend=remote,num_concurrent=1"
    ours = samples(tasks, "ours", "--model", "local-completions", "--model_args", address)
    weights = f"pretrained={MODEL.parent},gguf_file={MODEL.name},dtype=float32"
    theirs = samples(tasks, "theirs", "--model", "hf", "--device", "cpu", "--model_args", weights)
    assert len(theirs["chosen"]) == len(theirs["written"]) == QUESTIONS
    assert ours["written"] == theirs["written"]
    for of, answers in theirs["chosen"].items():
        for [(own, greedy)], [(wanted, most)] in zip(ours["chosen"][of], answers, strict=True):
            assert abs(float(own) - float(wanted)) <= NEAR
            assert str(greedy) == str(most)
