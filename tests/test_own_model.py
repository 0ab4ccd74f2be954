"""Somebody's own instruct model and documents, with paths and nothing else."""

import json
import re
import shlex
from pathlib import Path

import pytest

from jaxrag.cli import main
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.models.text.prompts import TEMPLATES

ROOT = Path(__file__).parents[1]
TEXTS = {
    "salt.txt": "The salt wells of Yanjing are worked by hand.",
    "bridge.md": "# The bridge\nA bamboo bridge crosses the river at the wells.",
}
QUESTION = "Who works the salt wells?"


@pytest.fixture(scope="module")
def kb(tmp_path_factory, chat_model_dir):
    folder = tmp_path_factory.mktemp("own") / "texts"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    path = folder.parent / "kb"
    assert main(["ingest", str(folder), "--kb", str(path), "--model", str(chat_model_dir)]) == 0
    return path


def test_the_model_is_asked_in_its_own_chat_format(jaxrag, kb):
    with KnowledgeBase.open(kb) as opened:
        assert opened.template == TEMPLATES["chat"]
    asked = ("ask", QUESTION, "--kb", kb, "--show-prompt", "--json", "--recompute-ratio", "0")
    code, out, _ = jaxrag(*asked)
    answer = json.loads(out)
    assert code == 0
    assert [part["part"] for part in answer["prompt"]] == [
        "prefix", "chunk 0", "chunk 1", "final block",
    ]  # fmt: skip
    prefix, *chunks, final = (part["text"] for part in answer["prompt"])
    assert prefix == (
        "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\n"
        "Answer the question from the passages below.\n\n"
    )
    wrapped = [
        f"[{title}]\n{TEXTS[name]}\n\n"
        for title, name in (("The bridge", "bridge.md"), ("salt", "salt.txt"))
    ]
    assert sorted(chunks) == sorted(wrapped)
    assert final == (
        f"Question: {QUESTION}\nGive a short answer. If the passages do not contain it, say so."
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    chunk_tokens = sum(part["tokens"] for part in answer["prompt"][1:-1])
    assert answer["counts"] == {"reused": chunk_tokens, "recomputed": 0, "encoded": 0}


def test_the_prompt_is_printed_above_the_answer(jaxrag, kb):
    code, _, out = jaxrag("ask", QUESTION, "--kb", kb, "--show-prompt", "--max-new-tokens", 2)
    assert code == 0
    heads = [line for line in out.splitlines() if line.startswith("--- ")]
    assert [head.split(",")[0] for head in heads] == [
        "--- prefix", "--- chunk 0", "--- chunk 1", "--- final block", "--- answer",
    ]  # fmt: skip
    assert "<|im_start|>assistant" in out.split("--- answer")[0]


@pytest.mark.slow
def test_the_gate_needs_only_its_probes(jaxrag, kb, tmp_path):
    probes = tmp_path / "probes.jsonl"
    probes.write_text(json.dumps({"question": QUESTION}))
    code, out, err = jaxrag("kb", "gate", kb, "--questions", probes)
    assert "turborag against full attention: 1 questions" in out
    assert (code == 0) == ("remembered: turborag" in out)
    assert (code == 3) == ("jaxrag: refused: turborag" in err)


def test_documents_given_on_the_spot_are_asked_in_the_same_format(jaxrag, kb, chat_model_dir):
    given = ("--documents", kb.parent / "texts" / "salt.txt", "--model", chat_model_dir)
    short = ("--max-new-tokens", 1)
    code, out, _ = jaxrag("ask", QUESTION, *given, "--show-prompt", "--json", *short)
    assert code == 0
    assert json.loads(out)["prompt"][0]["text"].startswith("<|im_start|>system")


def test_a_template_with_markers_that_the_tokenizer_lacks_is_refused(jaxrag, kb, chat_model_dir):
    for command in (
        (
            "ingest",
            kb.parent / "texts" / "salt.txt",
            "--kb",
            kb.parent / "other",
            "--model",
            chat_model_dir,
        ),
        ("ask", QUESTION, "--kb", kb),
    ):
        code, out, err = jaxrag(*command, "--template", "turborag")
        assert (code, out) == (1, "")
        assert "template 'turborag' holds <|doc_start|>, which is no token of this model's" in err
        assert err.count("\n") == 1 and "choose another template" in err


@pytest.mark.parametrize(
    "command",
    [
        ("needle", "--contexts", 500, "--num-questions", 1, "--methods", "turborag"),
        pytest.param(
            ("methods", "--num-questions", 2, "--chunks", 2, "--methods", "turborag"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda command: command[0],
)  # fmt: skip
def test_eval_takes_the_directory_that_ask_takes(jaxrag, chat_model_dir, command):
    name, *options = command
    code, out, err = jaxrag("eval", name, "--model", chat_model_dir, *options, "--json")
    assert code == 0, err
    assert json.loads(out)["model"]["template"] == TEMPLATES["chat"].to_dict()


@pytest.mark.slow
def test_the_quickstart_runs(jaxrag, chat_model_dir, tmp_path, monkeypatch):
    """Its commands from the check to the gate, with a random model of the same family."""
    page = (ROOT / "docs" / "getting-started.md").read_text(encoding="utf-8")
    page = page[page.index("\n## Quickstart") : page.index("\n## The demo")]
    lines = re.findall(r"^jaxrag .*$", page, re.M)
    assert [line.split()[1] for line in lines] == ["check", "ingest", "ask", "kb", "serve"]
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "qwen2.5-0.5b-instruct").symlink_to(chat_model_dir)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "questions.jsonl").write_text('{"question": "Who made the glass?"}\n')
    monkeypatch.chdir(tmp_path)
    said = []
    for line in lines[:-1]:
        code, out, told = jaxrag(*shlex.split(line)[1:])
        assert code in ((0, 3) if "gate" in line else (0,)), told  # 3: no ratio will do
        said.append(out + told)
    assert "memory" in said[0] and "fits" in said[0]
    assert "13 documents" in said[1]
    assert re.search(r"cacheblend: \d+ of \d+ chunk tokens reused", said[2])
