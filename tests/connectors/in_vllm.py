"""vLLM's side of the tests: python in_vllm.py JOB, run by its interpreter; prints one JSON line.

A job is a JSON file: {"folder": as random_cases.make left it, "engine": options of LLM, "extra": of
the connector, "class": of another connector and its module, "steps": [...]}. A step is {"ask":
numbers of cases or null, "how": "spans", "recognised" or "exact", "reset": first, "batch": all at
once, "logprobs": of so many first tokens}.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
}  # fmt: skip
sys.path.insert(0, str(Path(__file__).parent))


def llm_of(job):
    from vllm import LLM
    from vllm.config import KVTransferConfig

    folder = Path(job["folder"])
    kind, module = job.get("class", ("JaxragConnector", "jaxrag.connectors.vllm"))
    config = KVTransferConfig(
        kv_connector=kind,
        kv_role="kv_consumer",
        kv_connector_module_path=module,
        kv_connector_extra_config={
            "manifest": str(job.get("manifest") or folder / "manifest"), **job.get("extra", {})
        },
    )  # fmt: skip
    options = {"dtype": "float32", "block_size": 32, "max_model_len": 4096, **job.get("engine", {})}
    return LLM(
        str(folder / "model"), enforce_eager=True, enable_prefix_caching=True,
        skip_tokenizer_init=True, kv_transfer_config=config if job.get("connector", True) else None,
        disable_log_stats=False, **options,
    )  # fmt: skip


def ask(llm, data, numbers, how, count, logprobs):
    from vllm import SamplingParams, TokensPrompt

    prompts, sampling = [], []
    for number in numbers:
        case = data["cases"][number]
        parts = [data["prefix"], *(data["chunks"][at] for at in case["chunks"])]
        ids = [token for part in (*parts, case["final"]) for token in part]
        params = {"spans": {"spans": [len(it) for it in parts]}, "exact": {"off": True}}.get(how)
        extra = None if params is None else {"kv_transfer_params": {"jaxrag": params}}
        prompts.append(TokensPrompt(prompt_token_ids=ids))
        sampling.append(SamplingParams(
            temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, extra_args=extra,
            logprobs=logprobs,
        ))  # fmt: skip
    outs = llm.generate(prompts, sampling, use_tqdm=False)
    rows = []
    for it in outs:
        [answer] = it.outputs
        first = answer.logprobs[0] if logprobs else {}
        first = {int(token): one.logprob for token, one in first.items()}
        rows.append((list(answer.token_ids), it.num_cached_tokens, first))
    return rows


def metric(name):
    from prometheus_client import REGISTRY

    return sum(
        sample.value for family in REGISTRY.collect() for sample in family.samples
        if sample.name == name
    )  # fmt: skip


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    data = json.loads((Path(job["folder"]) / "cases.json").read_text())
    begun = time.perf_counter()
    try:
        llm = llm_of(job)
    except Exception as error:
        cause = error
        while under := cause.__cause__ or (not cause.__suppress_context__ and cause.__context__):
            cause = under
        print("RESULT" + json.dumps({"refused": str(cause)}), flush=True)
        return
    steps = []
    for step in job["steps"]:
        numbers = step.get("ask")
        numbers = range(len(data["cases"])) if numbers is None else numbers
        rows = []
        for group in [numbers] if step.get("batch") else [[it] for it in numbers]:
            if step.get("reset"):
                assert llm.reset_prefix_cache()
            rows += ask(llm, data, group, step["how"], step.get("count", 16), step.get("logprobs"))
        names = ("tokens", "cached", "firsts")
        steps.append(dict(zip(names, zip(*rows, strict=True), strict=True)))
    result = {
        "steps": steps,
        "preemptions": metric("vllm:num_preemptions_total"),
        "jax": "jax" in sys.modules,
        "catalog": any(name.startswith("jaxrag.library") for name in sys.modules),
        "seconds": time.perf_counter() - begun,
    }
    print("RESULT" + json.dumps(result), flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
