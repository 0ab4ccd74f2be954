"""The path of somebody new, from a wheel in an empty environment to a page, timed.

    python scripts/stranger.py --work /tmp/stranger

installs the wheel of this checkout, runs the demo, ingests a folder with a model that is made on
the spot, asks it, serves it, chats over HTTP and fetches the page. It begins without compiled
programs. Prints the seconds of each step, and how much sooner the demo's first tokens come, as one
JSON object; exit code 1 where a step fails, or the demo saves less than 5 times.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEAST = 5  # times sooner, in the last line of the demo
TEXTS = {
    "bridge.md": "# The bridge\n\nThe bridge of Ostrel was built in 1897 by Mira Tollen. It cost "
    "2.3 million crowns. Every spring the river rises to its third stone.\n",
    "bread.txt": "Bread of Ostrel is baked from rye and salt. Bakers light their ovens at four.\n",
}
QUESTION = "Who built the bridge of Ostrel?"
# Random weights: what is tried is the path, not the answer.
MODEL = """
import json, pathlib, sys
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

folder, documents = map(pathlib.Path, sys.argv[1:])
folder.mkdir()
words = Tokenizer(models.BPE())
words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
words.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(
    vocab_size=512, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet
)
words.train(list(map(str, documents.iterdir())), trainer)
words.save(str(folder / "tokenizer.json"))
size, width, inner, layers = words.get_vocab_size(), 64, 128, 2
(folder / "config.json").write_text(json.dumps({
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "vocab_size": size, "hidden_size": width, "intermediate_size": inner,
    "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "float32",
}))
shapes = {"model.embed_tokens.weight": (size, width), "model.norm.weight": (width,)}
for layer in range(layers):
    of = f"model.layers.{layer}."
    shapes |= {
        of + "input_layernorm.weight": (width,), of + "post_attention_layernorm.weight": (width,),
        of + "self_attn.q_proj.weight": (width, width),
        of + "self_attn.o_proj.weight": (width, width),
        of + "self_attn.k_proj.weight": (width // 2, width),
        of + "self_attn.v_proj.weight": (width // 2, width),
        of + "mlp.gate_proj.weight": (inner, width), of + "mlp.up_proj.weight": (inner, width),
        of + "mlp.down_proj.weight": (width, inner),
    }
draw, header, data = np.random.default_rng(0), {}, b""
for name, shape in shapes.items():
    values = np.ones(shape) if len(shape) == 1 else draw.normal(0, 0.05, shape)
    raw = values.astype("<f4").tobytes()
    header[name] = {
        "dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]
    }
    data += raw
head = json.dumps(header).encode()
whole = len(head).to_bytes(8, "little") + head + data
(folder / "model.safetensors").write_bytes(whole)
"""


def main() -> int:
    """Go the path; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="made anew")
    work = parser.parse_args().work.absolute()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    seconds: dict[str, float] = {}
    sooner: list[int] = []
    failed = ""
    try:
        for name, step in steps(work, sooner):
            start = time.perf_counter()
            step()
            seconds[name] = round(time.perf_counter() - start, 1)
    except (subprocess.CalledProcessError, OSError, AssertionError) as error:
        failed = f"{error}\n{getattr(error, 'stderr', '') or ''}"
    print(json.dumps({"seconds": seconds, "sooner": sooner, "passed": not failed}))
    if failed:
        print(failed, file=sys.stderr)
    return int(bool(failed))


def steps(work: Path, sooner: list[int]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Every step by name, in their order; each demo adds to ``sooner`` how much it saves."""
    bin_folder = work / "env" / "bin"
    python, jaxrag = str(bin_folder / "python"), str(bin_folder / "jaxrag")

    def run(*words: str) -> str:
        done = subprocess.run(
            words, cwd=work, check=True, capture_output=True, text=True, env=environment(work)
        )
        return done.stdout

    def install() -> None:
        run(sys.executable, "-m", "venv", "env")
        [wheel] = work.glob("*.whl")
        run(python, "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"),
            f"{wheel}[serve]")  # fmt: skip

    def demo() -> None:
        said = run(jaxrag, "demo")
        found = re.search(r"^(\d+)x sooner: ", said, re.MULTILINE)
        assert found, said[-400:]
        sooner.append(int(found[1]))
        assert sooner[-1] >= LEAST, said[-400:]

    def folder() -> None:
        (work / "docs").mkdir()
        for name, text in TEXTS.items():
            (work / "docs" / name).write_text(text, encoding="utf-8")
        run(python, "-c", MODEL, "model", "docs")
        run(jaxrag, "check", "model")
        assert "2 documents" in run(jaxrag, "ingest", "docs", "--kb", "kb", "--model", "model")

    def ask() -> None:
        answer = json.loads(run(jaxrag, "ask", QUESTION, "--kb", "kb", "--json"))
        assert answer["sources"] and not answer["counts"]["encoded"], answer

    yield (
        "wheel",
        lambda: run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", ".", str(ROOT)),
    )
    yield "install", install
    yield "demo", demo
    yield "demo again", demo
    yield "own folder and model", folder
    yield "ask", ask
    with contextlib.ExitStack() as ends:
        served: list[str] = []
        yield "serve", lambda: served.append(ends.enter_context(serving(work, jaxrag)))
        yield "chat", lambda: chat(served[0])
        yield "page", lambda: page(served[0])


def environment(work: Path) -> dict[str, str]:
    """Ours, without what leads to this checkout or to compiled programs; pip's cache stays."""
    ours = {
        name: value
        for name, value in os.environ.items()
        if name != "PYTHONPATH" and not name.startswith("JAX_")
    }
    caches = {"XDG_CACHE_HOME": str(work / "cache")}
    caches["PIP_CACHE_DIR"] = ours.get("PIP_CACHE_DIR", str(Path.home() / ".cache" / "pip"))
    return ours | caches | {"JAX_PLATFORMS": "cpu"}


@contextlib.contextmanager
def serving(work: Path, jaxrag: str) -> Iterator[str]:
    """A server of the folder; yields its address once it says so."""
    words = [jaxrag, "serve", "--kb", "kb", "--port", "0"]
    server = subprocess.Popen(
        words, cwd=work, stdout=subprocess.PIPE, text=True, env=environment(work)
    )
    try:
        assert server.stdout is not None
        found = re.search(r"http://[\w.:]+", server.stdout.readline())
        assert found, "the server ended before it was ready"
        yield found[0]
    finally:
        server.terminate()
        server.wait()


def chat(url: str) -> None:
    """Ask as OpenAI's clients do."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 4}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        said = json.load(answer)
    assert said["jaxrag"]["sources"], said


def page(url: str) -> None:
    """The page is there."""
    with urllib.request.urlopen(f"{url}/", timeout=30) as answer:
        assert b"<html" in answer.read()


if __name__ == "__main__":
    sys.exit(main())
