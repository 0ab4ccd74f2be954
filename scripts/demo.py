"""The whole path on the example documents: ingest once, then ask with and without cached chunks.

Makes a small random Llama and a tokenizer trained on the documents, encodes the documents into a
knowledge base, answers questions with full attention and with TurboRAG, and prints what each took.

example: python scripts/demo.py --questions 6
"""

import argparse
import dataclasses
import json
import shutil
import sys
from pathlib import Path

import jax
from tokenizers import processors

import jaxrag
from jaxrag.bench import byte_level
from jaxrag.bench.ttft import LLAMA_100M
from jaxrag.cli.options import human_count, shorten, table
from jaxrag.config import ModelConfig, RopeConfig
from jaxrag.documents import Document
from jaxrag.models.export import export_hf
from jaxrag.models.spec import init_params, num_params

ROOT = Path(__file__).resolve().parents[1]
SPECIALS = ["<|begin|>", "<|end|>", "<|doc_start|>", "<|doc_end|>"]
METHODS = ("full_attention", "turborag")


def demo_config(vocab_size: int) -> ModelConfig:
    """A Llama of about 20M parameters."""
    return dataclasses.replace(
        LLAMA_100M,
        vocab_size=vocab_size,
        num_layers=8,
        model_dim=384,
        mlp_dim=1152,
        num_heads=12,
        num_kv_heads=4,
        head_dim=32,
        rope=RopeConfig(theta=10_000.0, rotary_dim=32, interleaved=False, scaling=None),
        max_positions=8192,
        bos_id=0,
        eos_ids=(1,),
    )


def make_model(directory: Path, texts: list[str]) -> int:
    """Write a Hugging Face directory with random weights; returns the number of parameters."""
    tokenizer = byte_level.train(texts, 4096, SPECIALS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    config = demo_config(tokenizer.get_vocab_size())
    export_hf(directory, init_params(config, jax.random.key(0)), config)
    settings = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    byte_level.save(tokenizer, directory, settings)
    return num_params(config)


def main() -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", type=int, default=6, metavar="N", help="to ask (6)")
    parser.add_argument("--k", type=int, default=4, metavar="N", help="chunks a question (4)")
    parser.add_argument("--work", type=Path, default=ROOT / ".cache" / "demo", metavar="DIR")
    args = parser.parse_args()
    shutil.rmtree(args.work, ignore_errors=True)
    args.work.mkdir(parents=True)

    documents = list(jaxrag.read_paths([ROOT / "examples" / "documents"]))
    texts = [document.text for document in documents if isinstance(document, Document)]
    print(f"1. A model: {len(texts)} example documents train a tokenizer, weights are random.")
    size = make_model(args.work / "model", texts)
    print(
        f"   {human_count(size)} parameters, NOT TRAINED: its answers are noise. Retrieval, the\n"
        "   cached KV, counts and timings below are real."
    )

    print("2. Ingest: every chunk is encoded once.")
    model = jaxrag.load_model(args.work / "model")
    with jaxrag.KnowledgeBase.open(
        args.work / "kb", model=model, template="turborag", chunk_tokens=320, overlap=16
    ) as kb:
        report = kb.add(documents, progress=True)
        print(
            f"   {report.documents} documents, {report.chunks} chunks, "
            f"{human_count(report.tokens)} tokens, {report.seconds:.1f} s "
            f"({human_count(report.tokens_per_second)} tokens/s, compilation included)"
        )
        for bad in report.skipped:
            print(f"   skipped {bad.source}: {bad.reason}", file=sys.stderr)

        print("3. Ask: each question twice, after a round that compiles and is not measured.\n")
        lines = (ROOT / "examples" / "questions.jsonl").read_text(encoding="utf-8").splitlines()
        questions = [json.loads(line)["question"] for line in lines][: args.questions]
        head = ["question", "answer (noise)", "sources", "chunk tokens"]
        head += ["TTFT full, ms", "turbo, ms"]
        rows = [[*head, "ratio", "full FLOP", "turbo FLOP"]]
        room = max(shutil.get_terminal_size().columns, 120) - 84  # for the three text columns
        encoded = 0
        for warm in (True, False):
            model.forget_cache()  # so that TTFT includes reading the chunks from the store
            _ = model.cache
            for question in questions:
                full, turbo = (
                    jaxrag.generate(question, kb=kb, method=method, k=args.k, max_new_tokens=12)
                    for method in METHODS
                )
                if warm:
                    continue
                encoded += turbo.counts["encoded"]
                names = dict.fromkeys(Path(s.document_id).stem for s in turbo.sources)
                times = [r.timings["ttft"] for r in (full, turbo)]
                rows.append(
                    [
                        shorten(question, room // 2),
                        shorten(turbo.text, room // 4),
                        shorten(", ".join(names), room // 2),
                        str(sum(turbo.counts.values())),
                        f"{1000 * times[0]:.0f}",
                        f"{1000 * times[1]:.0f}",
                        f"{times[0] / times[1]:.1f}x",
                        human_count(full.flops),
                        human_count(turbo.flops),
                    ]
                )
        print(table(rows, right=(3, 4, 5, 6, 7, 8)))
    print(
        f"\n{len(rows) - 1} questions; turborag encoded {encoded} chunk tokens at question time: "
        "everything came from the knowledge base."
        if not encoded
        else f"\nturborag had to encode {encoded} chunk tokens at question time"
    )
    return 1 if encoded else 0


if __name__ == "__main__":
    sys.exit(main())
