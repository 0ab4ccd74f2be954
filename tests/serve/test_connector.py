"""The folder by which another engine reads a knowledge base: what is in it, and what it refuses."""

import dataclasses
import json
import shlex
from pathlib import Path

import numpy as np
import pytest
from refusal import refused

import jaxrag
from jaxrag.base.errors import ConfigError, KnowledgeBaseError, RequestError
from jaxrag.base.installed import config_path
from jaxrag.cli import main
from jaxrag.connectors import manifest
from jaxrag.connectors.plan import Planner
from jaxrag.connectors.prompt_log import PromptLog
from jaxrag.models.export import convert, export_hf
from jaxrag.models.model import random_model
from jaxrag.serve.compatibility import gate_subject
from jaxrag.serve.connector import write_connector

TEXTS = {"a.md": "Kora keeps a quokka.", "b.md": "The mill is old.", "c.md": "Nobody swims here."}


@pytest.fixture(scope="module")
def model(model_dir):
    return jaxrag.load_model(model_dir)


@pytest.fixture
def kb(model, tmp_path):
    with jaxrag.KnowledgeBase.open(
        tmp_path / "kb", model=model, encoders=["isolated", "after_prefix"]
    ) as opened:
        opened.add([{"id": name, "text": text} for name, text in TEXTS.items()])
        yield opened


def prompt(kb, *names):
    """Prefix, all chunks of the documents, and three tokens more."""
    tokenizer = kb.model.tokenizer
    chunks = [
        kb.template.chunk_ids(tokenizer, hit.ids, hit.title)
        for name in names
        for hit in kb.chunks_of(name)
    ]
    parts = [kb.template.prefix_ids(tokenizer), *chunks, np.array([5, 6, 7], np.int32)]
    return np.concatenate(parts).astype(np.int32)


@pytest.mark.parametrize("encoder", ["isolated", "after_prefix"])
def test_every_prompt_of_its_chunks_is_found_in_the_store(kb, tmp_path, encoder):
    report = write_connector(kb, tmp_path / "out", encoder=encoder)
    assert (report.encoder, report.parts, report.missing) == (encoder, len(TEXTS), 0)
    found = manifest.read(tmp_path / "out")
    ids = prompt(kb, "c.md", "a.md")
    plan, reason = Planner(found).plan(ids, None, 0)
    assert reason == ""
    assert plan.end == len(ids) - 3
    keys = [key for key, _ in plan.parts]
    records = kb.store.head(keys)
    assert [record.tokens for record in records] == [tokens for _, tokens in plan.parts]


def test_a_removed_document_is_no_part_any_more(kb, tmp_path):
    write_connector(kb, tmp_path / "out")
    watched = manifest.Watched(tmp_path / "out")
    kb.remove(["a.md"])
    assert write_connector(kb, tmp_path / "out").parts == 2
    watched._looked -= 10
    gone, left = prompt(kb, "b.md"), kb.template.prefix_ids(kb.model.tokenizer)
    plan, _ = Planner(watched.current()).plan(gone, None, 0)
    assert plan.end == len(gone) - 3
    text = kb.model.tokenizer.encode(TEXTS["a.md"])
    wrapped = kb.template.chunk_ids(kb.model.tokenizer, text, "")
    ids = np.concatenate((left, wrapped, [5])).astype(np.int32)
    assert Planner(watched.current()).plan(ids, None, 0) == (None, "unknown")


@pytest.mark.parametrize("encoder", ["isolated", "after_prefix"])
def test_what_an_engine_wanted_is_encoded_once_and_kept(kb, tmp_path, encoder):
    write_connector(kb, tmp_path / "out", encoder=encoder)
    part, known = np.arange(20, 50, dtype=np.int32), prompt(kb, "a.md")
    left = kb.template.prefix_ids(kb.model.tokenizer)
    ids = np.concatenate((left, part, known[len(left) :])).astype(np.int32)
    digest = kb.model.tokenizer.digest
    notes = PromptLog(tmp_path / "out", digest, 10_000)
    notes.note(ids, None)
    notes.note(known, [len(left), len(known) - len(left) - 3])  # of a document
    PromptLog(tmp_path / "out", "of another", 10_000).note(ids, [len(left), 9])
    for encoded in (1, 0):
        report = write_connector(kb, tmp_path / "out", encoder=encoder)
        assert (report.parts, report.noted, report.encoded) == (len(TEXTS) + 1, 1, encoded)
        assert report.missing == 0
    plan, _ = Planner(manifest.read(tmp_path / "out")).plan(ids, None, 0)
    assert plan.end == len(ids) - 3
    assert all(kb.store.head([key for key, _ in plan.parts]))
    (tmp_path / "out" / "wanted.jsonl").unlink()
    assert write_connector(kb, tmp_path / "out", encoder=encoder).parts == len(TEXTS)


def test_passages_are_for_weights_that_read_blocks(kb, tmp_path):
    """Of after_prefix no training speaks, and a gate judges the template's prompts only."""
    rules = tmp_path / "rules.toml"
    common = config_path("common", "passages").read_text()
    rules.write_text(common.replace("worth = 1024 ", "worth = 64 "))
    tokenizer = kb.model.tokenizer
    text = "\n".join(f"<doc>\n{'Bees fly far. ' * at}\n</doc>" for at in (20, 30))
    pasted = tokenizer.encode(f"{text}\nWhere do bees fly?")
    ids = np.concatenate((kb.template.prefix_ids(tokenizer), pasted)).astype(np.int32)
    for encoder, noted in (("after_prefix", 0), ("isolated", 4)):
        out = tmp_path / encoder
        write_connector(kb, out, encoder=encoder)
        PromptLog(out, tokenizer.digest, 100_000).note(ids, None)
        report = write_connector(kb, out, encoder=encoder, passage_rules=str(rules))
        assert report.noted == report.encoded == noted


def test_documents_of_groups_are_left_out(kb, tmp_path):
    kb.add([{"id": "d.md", "text": "For some only.", "metadata": {"groups": ["staff"]}}])
    assert write_connector(kb, tmp_path / "out").parts == 3
    assert write_connector(kb, tmp_path / "out", groups=["others"]).parts == 3
    assert write_connector(kb, tmp_path / "out", groups=["staff"]).parts == 4


def test_what_speaks_for_the_answers(kb, tmp_path):
    def gates(encoder="after_prefix"):
        return write_connector(kb, tmp_path / "out", encoder=encoder).gates

    assert gates("isolated") == (manifest.Gate("turborag", 0, 0),)  # as its reading.toml says
    assert gates() == ()
    subject = gate_subject(jaxrag.METHODS["full_reuse"], kb.template)
    gate = {"subject": subject, "ratio": 0.0, "questions": 9}
    kb.set_gate("full_reuse", gate | {"ratio": 0.15})
    assert gates() == ()
    kb.set_gate("full_reuse, 2 computed", gate | {"compute_last": 2})
    assert gates() == (manifest.Gate("full_reuse", 2, 9),)
    other = gate_subject(jaxrag.METHODS["full_reuse"], jaxrag.TEMPLATES["plain"])
    kb.set_gate("full_reuse, 2 computed", gate | {"subject": other})
    assert gates() == ()


def test_the_directory_that_is_served(kb, model_dir, tmp_path, tiny_config):
    convert(model_dir, tmp_path / "orbax", "jaxrag")
    convert(tmp_path / "orbax", tmp_path / "again", "huggingface")
    report = write_connector(kb, tmp_path / "out", serve=tmp_path / "again")
    words = shlex.split(report.command)
    assert words[:3] == ["vllm", "serve", str(tmp_path / "again")]
    config = json.loads(words[-1])
    assert config["kv_connector_extra_config"] == {"manifest": str(tmp_path / "out")}
    with refused(RequestError):
        write_connector(kb, tmp_path / "out", serve=tmp_path / "orbax")
    other = random_model(kb.model.config, 7)
    export_hf(tmp_path / "other", other.params, other.config)
    with refused(RequestError):
        write_connector(kb, tmp_path / "out", serve=tmp_path / "other")


def test_refused_before_work(kb, tmp_path):
    for encoder, said in (("neighbours", ""), ("nothing", "")):
        with refused(RequestError, said):
            write_connector(kb, tmp_path / "out", encoder=encoder)
    with refused(ConfigError, "'none'"):
        write_connector(kb, tmp_path / "out", passage_rules="none")
    assert not (tmp_path / "out").exists()
    own = kb.model.config
    with pytest.MonkeyPatch.context() as patch, refused(RequestError, "2 ways"):
        kinds = {"more_ropes": (own.rope,), "rope_layers": (0, 1)}
        patch.setattr(kb.model, "config", dataclasses.replace(own, **kinds))
        write_connector(kb, tmp_path / "out")
    with jaxrag.KnowledgeBase.open(kb.path, mode="r") as closed, refused(KnowledgeBaseError):
        write_connector(closed, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command(kb, tmp_path, capsys):
    kb.close()
    out = str(tmp_path / "out")
    assert main(["kb", "connector", str(kb.path), out]) == 0
    said = capsys.readouterr()
    assert "3 parts of encoder isolated" in said.out
    assert "vllm serve" in said.out
    assert main(["kb", "connector", str(kb.path), out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parts"] == 3
    assert Path(out, "connector.json").is_file()
