"""Times what a user of a pretrained model meets: ingest, questions in new processes, two servers.

Everything is run by the program itself, each step in a process of its own, with a compilation cache
that is empty before the first. A server is asked as soon as it listens.

  python scripts/first_use.py --model MODEL --documents DIR --out FILE

``--tree`` runs another checkout of the project, with the same interpreter.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from jaxrag.measure.machine import describe

TOKENS = 16
QUESTIONS = 3
PATIENCE = 900.0  # seconds until a server must answer


class Program:
    """The program of a checkout, with files of its own."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self.kb, self._tree = folder / "kb", tree
        kept = {"XDG_CACHE_HOME": str(folder), "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"}
        others = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
        self._environment = others | kept

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """A command, whose standard output is read."""
        command = [sys.executable, "-m", "jaxrag", *arguments]
        return subprocess.Popen(
            command,
            cwd=self._tree,  # which Python searches first
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, *arguments: str) -> tuple[float, str]:
        """Seconds of a command, and what it printed. Raises RuntimeError where it fails."""
        start = time.monotonic()
        process = self.start(*arguments)
        out, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"jaxrag {' '.join(arguments)}: exit code {process.returncode}")
        return time.monotonic() - start, out


def asked(program: Program, question: str) -> dict[str, Any]:
    """A question in a process of its own: wall time, and the timings of the answer."""
    options = ["--kb", str(program.kb), "--max-new-tokens", str(TOKENS), "--json"]
    seconds, out = program.run("ask", question, *options)
    return {"seconds": seconds, "timings": json.loads(out)["timings"]}


def served(program: Program, question: str) -> dict[str, float]:
    """Seconds from a server's start until it listens, is ready, and has answered a question."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    at, start = f"http://127.0.0.1:{port}", time.monotonic()
    server = program.start("serve", "--kb", str(program.kb), "--port", str(port))
    try:
        times = {"listens": reached(f"{at}/health", start, anything=True)}
        times["ready"] = reached(f"{at}/ready", start)
        with urllib.request.urlopen(f"{at}/v1/models") as models:
            names = [it["id"] for it in json.load(models)["data"]]
        [over_base] = [name for name in names if name.endswith(f"@{program.kb.name}")]
        messages = [{"role": "user", "content": question}]
        request = urllib.request.Request(
            f"{at}/v1/chat/completions",
            json.dumps({"model": over_base, "messages": messages, "max_tokens": TOKENS}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            json.load(answer)
        times["answered"] = time.monotonic() - start
    finally:
        server.terminate()
        server.communicate()
    return times


def reached(address: str, start: float, *, anything: bool = False) -> float:
    """Seconds since ``start`` when an address answers: 200, or with ``anything`` at all."""
    while time.monotonic() - start < PATIENCE:
        try:
            urllib.request.urlopen(address, timeout=5).close()
        except urllib.error.HTTPError:
            if anything:
                break
        except OSError:
            pass
        else:
            break
        time.sleep(0.05)
    else:
        raise RuntimeError(f"{address} does not answer")
    return time.monotonic() - start


def measure(tree: Path, model: str, documents: str, dtype: str, question: str) -> dict[str, Any]:
    """Every step in turn."""
    with tempfile.TemporaryDirectory(prefix="jaxrag-first-use-") as folder:
        program = Program(tree, Path(folder))
        ingest = ["ingest", documents, "--kb", str(program.kb), "--model", model, "--dtype", dtype]
        seconds, _ = program.run(*ingest)
        stored = sum(it.stat().st_size for it in program.kb.rglob("*") if it.is_file())
        return {
            "ingest": {"seconds": seconds, "bytes": stored},
            "ask": [asked(program, question) for _ in range(QUESTIONS)],
            "serve": [served(program, question) for _ in range(2)],
        }


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--documents", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--question", default="What is the procedure in a power failure?")
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model, documents = (
        str(Path(it).resolve()) if Path(it).exists() else it for it in (args.model, args.documents)
    )
    found = measure(args.tree.resolve(), model, documents, args.dtype, args.question)
    commit = subprocess.check_output(["git", "-C", args.tree, "rev-parse", "HEAD"], text=True)
    result = {
        "benchmark": "first-use",
        "model": Path(args.model).name,
        "documents": args.documents,
        "dtype": args.dtype,
        "measured": commit.strip(),
        **found,
        "machine": describe(),
    }
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
