"""Random requests to vLLM while the store fails: python chaos_in_vllm.py JOB, as in_vllm.py.

Some requests are aborted. Each round has one fault. An answer says whether it is from stored
chunks: then it must be that of `turborag`, else that of full attention.
"""

import collections
import json
import os
import random
import sys
import time
from pathlib import Path

import in_vllm

FAULTS = ("none", "down", "flipped", "missing", "removed", "slow")


class Store:
    """The folder of a store, which can be hurt and healed."""

    def __init__(self, folder, slow):
        self.folder, self.slow, self.undo = folder, slow, []
        self.chunks = sorted({path.parent for path in folder.rglob("commit.json")})

    def hurt(self, fault, rng):
        if fault == "slow":
            self.slow.touch()
            self.undo.append(self.slow.unlink)
        elif fault == "down":
            aside = self.folder.with_name("aside")
            self.folder.rename(aside)
            self.undo.append(lambda: aside.rename(self.folder))
        elif fault == "flipped":
            for chunk in rng.sample(self.chunks, 3):
                [path] = chunk.glob("*/c/0/0/0/0/0")
                content = path.read_bytes()
                at = rng.randrange(len(content))
                path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
                self.undo.append(lambda path=path, content=content: path.write_bytes(content))
        elif fault in ("missing", "removed"):
            for chunk in rng.sample(self.chunks, 3):
                aside = self.folder.with_name(f"aside-{chunk.name}")
                chunk.rename(aside)
                self.undo.append(lambda aside=aside, chunk=chunk: aside.rename(chunk))

    def heal(self):
        while self.undo:
            self.undo.pop()()


def request(data, number, how, name):
    from vllm import SamplingParams, TokensPrompt

    case = data["cases"][number]
    parts = [data["prefix"], *(data["chunks"][at] for at in case["chunks"])]
    ids = [token for part in (*parts, case["final"]) for token in part]
    params = {"spans": {"spans": [len(it) for it in parts]}, "exact": {"off": True}}.get(how, {})
    sampling = SamplingParams(
        temperature=0, max_tokens=16, ignore_eos=True, detokenize=False,
        extra_args={"kv_transfer_params": {"jaxrag": params}},
    )  # fmt: skip
    return name, TokensPrompt(prompt_token_ids=ids), sampling


def round_of(engine, data, store, rng, fault, names, said):
    """One round: requests arrive between steps, and a third of them are aborted."""
    if fault != "removed":
        store.hurt(fault, rng)
    kinds = ("spans", "recognised", "exact")
    waiting = [(name, rng.randrange(len(data["cases"])), rng.choice(kinds)) for name in names]
    begun, asked, steps = {}, {}, 0
    leave = {}
    while waiting or begun:
        if waiting and (not begun or rng.random() < 0.8):  # enough at once for preemptions
            name, number, how = waiting.pop()
            engine.add_request(*request(data, number, how, name))
            begun[name], asked[name] = time.monotonic(), (number, how)
            if rng.random() < 0.3:
                leave[name] = steps + rng.randrange(20)
        if steps == 4 and fault == "removed":
            store.hurt(fault, rng)
        for name in [name for name, at in leave.items() if at <= steps]:
            del leave[name]
            if begun.pop(name, None) is not None:
                engine.abort_request([name])
                said["aborted"] += 1
        for out in engine.step():
            if not out.finished or out.request_id not in begun:
                continue
            seconds = time.monotonic() - begun.pop(out.request_id)
            said["late"] += seconds > 30
            number, how = asked[out.request_id]
            told = (out.kv_transfer_params or {}).get("jaxrag", {})
            kind = "stored" if told.get("stored") else "full"
            said["wrong"] += list(out.outputs[0].token_ids) != data[kind][number]
            said[f"{fault}: " + (kind if kind == "stored" else told["computed"])] += 1
            said["exact that were stored"] += how == "exact" and kind == "stored"
        if any(time.monotonic() - at > 60 for at in begun.values()):
            said["hung"] += len(begun)
            return
        steps += 1
    store.heal()
    if fault == "slow":
        time.sleep(3)  # until the threads that wait are back


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    data = json.loads((Path(job["folder"]) / "cases.json").read_text())
    store = Store(Path(job["store"]), Path(os.environ["JAXRAG_SLOW"]))
    llm = in_vllm.llm_of(job)
    rng, said = random.Random(job["seed"]), collections.Counter()
    total, each = job["requests"], 25
    for first in range(0, total, each):
        fault = FAULTS[first // each % len(FAULTS)]
        assert llm.reset_prefix_cache()
        names = [str(it) for it in range(first, min(first + each, total))]
        round_of(llm.llm_engine, data, store, rng, fault, names, said)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    found = dict(said) | {
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "usage": scheduler.kv_cache_manager.usage,
        "preemptions": in_vllm.metric("vllm:num_preemptions_total"),
    }
    print("RESULT" + json.dumps(found), flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
