"""What a user meets when files are damaged, gone or foreign, the disk is full or read-only."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from refusal import refused

from jaxrag import generate
from jaxrag.base.errors import KnowledgeBaseError
from jaxrag.engine.engine import engine_of
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.models.model import random_model

QUESTION = "amber birch cedar?"
ROOT = Path(__file__).parents[3]


@pytest.fixture
def full_kb(kb, text_of):
    """A knowledge base of three documents, and its folder."""
    kb.add([{"id": f"d{seed}", "text": text_of(seed, 12)} for seed in range(3)])
    return kb


def shards(kb):
    """The data files of chunks, the largest last: chunks of documents, not of the prefix."""
    files = [path for path in (kb.path / "kv").rglob("c/**/*") if path.is_file()]
    return sorted(files, key=lambda path: path.stat().st_size)


def ask(kb):
    """An answer whose chunks came from the store, not from the device's pool."""
    engine_of(kb.model).forget()
    return generate(QUESTION, kb=kb, method="turborag", max_new_tokens=4)


def flip_bit(path, offset=64):
    """A new file with one bit changed, as mapped files must not change under a reader."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 8
    path.unlink()
    path.write_bytes(data)


def truncate(path):
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (flip_bit, "0 not in the store, 1 corrupt there"),
        (truncate, "0 not in the store, 1 corrupt there"),
        (Path.unlink, "1 not in the store, 0 corrupt there"),
    ],
)
def test_a_damaged_chunk_is_encoded_again_told_and_healed(full_kb, damage, why):
    good = ask(full_kb)
    assert good.counts["encoded"] == 0
    damage(shards(full_kb)[-1])
    result = ask(full_kb)
    assert result.token_ids == good.token_ids
    assert 0 < result.counts["encoded"] < sum(result.counts.values())
    (note,) = result.notes
    assert why in note
    assert note.endswith("and stored")
    healed = ask(full_kb)
    assert (healed.counts, healed.notes) == (good.counts, [])
    assert healed.token_ids == good.token_ids
    assert full_kb.verify().damaged == ()


def test_a_chunk_of_another_model_is_never_served(full_kb, make_kb, config, text_of, tmp_path):
    """The files of another model's chunk under this chunk's name: refused, not read."""
    good = ask(full_kb)
    other_model = random_model(config, seed=7, tokenizer=full_kb.model.tokenizer)
    options = {"template": "plain", "chunk_tokens": 100}
    with KnowledgeBase.open(tmp_path / "other", other_model, **options) as other:
        other.add([{"id": f"d{seed}", "text": text_of(seed, 12)} for seed in range(3)])
        here, there = shards(full_kb)[-1].parents[6], shards(other)[-1].parents[6]
    shutil.rmtree(here)
    shutil.copytree(there, here)
    result = ask(full_kb)
    assert result.token_ids == good.token_ids
    assert "1 corrupt there) and stored" in result.notes[0]
    with refused(KnowledgeBaseError):
        KnowledgeBase.open(full_kb.path, other_model)


def test_a_knowledge_base_open_for_reading_uses_what_it_encodes_and_keeps_nothing(full_kb):
    flip_bit(shards(full_kb)[-1])
    before = sorted(path.name for path in full_kb.path.rglob("*"))
    with KnowledgeBase.open(full_kb.path, full_kb.model, mode="r") as reader:
        for _ in range(2):
            assert "not stored: the store is open for reading only" in ask(reader).notes[0]
    assert sorted(path.name for path in full_kb.path.rglob("*")) == before


PROGRAM = """
import json, sys
from pathlib import Path
import jaxrag
from jaxrag.base.errors import JaxragError, KnowledgeBaseError, StoreError
model = jaxrag.load_model(sys.argv[1], cache_tokens=4096)
folder = Path(sys.argv[2])
def text(number):
    words = "amber birch cedar delta ember fjord grove heath larch".split()
    return f"unique{number} " + " ".join(words[(number * k) % 9] for k in range(1, 30))
def opened(**options):
    return jaxrag.KnowledgeBase.open(folder, model, **options)
def ask(kb):
    return jaxrag.generate("amber?", kb=kb, method="turborag", max_new_tokens=3)
"""


def in_a_mount(mount, body, *arguments):
    """Run a program where ``mount``, a shell command, holds for it alone; its last line as JSON."""
    namespace = ["unshare", "--mount"]
    if os.geteuid() != 0:
        namespace += ["--user", "--map-root-user"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*namespace, "sh", "-c", mount], capture_output=True).returncode
    ):
        pytest.skip("mounting is not permitted here")
    done = subprocess.run(
        [*namespace, "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, "-c",
         PROGRAM + body, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_read_only_file_system_serves_search_and_answers(tmp_path, text_model, model_dir):
    folder = tmp_path / "kb"
    with KnowledgeBase.open(folder, text_model, template="plain", chunk_tokens=64) as kb:
        kb.add([{"id": "a", "text": "amber birch and cedar"}, {"id": "b", "text": "delta ember"}])
        expected = generate("amber?", kb=kb, method="turborag", max_new_tokens=3)
    body = """
def refused(action):
    try:
        action()
    except KnowledgeBaseError as error:
        return str(error)
try:
    (folder / "probe").touch()
    writable = True
except OSError:
    writable = False
with opened() as kb:
    result = ask(kb)
    print(json.dumps({
        "writable": writable,
        "mode": kb.mode,
        "documents": [entry.id for entry in kb.documents()],
        "hits": [hit.document_id for hit in kb.search("delta")],
        "tokens": result.token_ids,
        "notes": result.notes,
        "verified": kb.verify().ok,
        "chunks": kb.stats()["chunks"],
        "add": refused(lambda: kb.add(["new"])),
        "open": refused(lambda: opened(mode="rw")),
    }))
"""
    mount = f"mount --bind '{folder}' '{folder}' && mount -o remount,ro,bind '{folder}'"
    seen = in_a_mount(mount, body, model_dir, folder)
    assert not seen["writable"]
    assert seen["mode"] == "r"
    assert seen["documents"] == ["a", "b"]
    assert seen["hits"] == ["b"]
    assert seen["tokens"] == expected.token_ids
    assert seen["notes"] == []
    assert (seen["verified"], seen["chunks"]) == (2, 2)
    assert "opened for reading; open it with mode 'rw'" in seen["add"]
    assert "cannot be written; open it with mode 'r'" in seen["open"]


def test_a_full_disk_loses_nothing_that_was_acknowledged(tmp_path, model_dir):
    """Documents are added to a file system of one megabyte until one does not fit.

    Then some space is freed, as SQLite needs some to remove documents.
    """
    folder = tmp_path / "kb"
    folder.mkdir()
    body = """
ballast = folder / "ballast"
ballast.write_bytes(bytes(200_000))
kb = opened(template="plain", chunk_tokens=64, chunk_by="tokens")
added, error = [], None
while error is None and len(added) < 2000:
    try:
        kb.add([{"id": f"d{len(added)}", "text": text(len(added))}])
        added.append(len(added))
    except JaxragError as refused:
        error = str(refused)
standing = [entry.id for entry in kb.documents()]
report = kb.verify()
found = [kb.search(f"unique{number}", 1)[0].document_id for number in added]
notes = ask(kb).notes
other = jaxrag.generate("amber?", kb=kb, method="full_reuse", max_new_tokens=1, k=10)
kb.close()
ballast.unlink()
with opened() as kb:
    after = [entry.id for entry in kb.documents()]
    kb.remove([f"d{number}" for number in added[: len(added) // 2]])
    kb.gc(grace_seconds=0.0)
    kb.add([{"id": "again", "text": text(0)}])
    again = ask(kb).notes, kb.verify()
print(json.dumps({
    "error": error, "added": len(added), "standing": len(standing), "found": len(set(found)),
    "damaged": len(report.damaged), "notes": notes, "not_kept": other.notes, "after": len(after),
    "again": again[0], "again_damaged": len(again[1].damaged),
}))
"""
    mount = f"mount -t tmpfs -o size=1m tmpfs '{folder}'"
    seen = in_a_mount(mount, body, model_dir, folder)
    assert seen["error"] is not None
    assert "\n" not in seen["error"]
    assert "No space left" in seen["error"] or "full" in seen["error"]
    assert seen["added"] > 3
    assert seen["found"] == seen["added"]
    # The disk may fill behind the commit of one more, which is whole, and was not acknowledged.
    assert seen["added"] <= seen["standing"] == seen["after"] <= seen["added"] + 1
    assert seen["damaged"] == seen["again_damaged"] == 0
    assert seen["notes"] == seen["again"] == []
    # A variant that no ingestion made is encoded for a question, which is answered all the same.
    assert "and not stored: " in seen["not_kept"][0]
    assert "No space left" in seen["not_kept"][0]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("layout", {"stored": "int4-third"}, "stored=int4-third"),
        ("attention_index", {"kind": "roargraph"}, "attention_index=roargraph"),
    ],
)
def test_a_form_that_is_not_known_any_more_is_refused_in_one_line(kb, make_kb, name, value, said):
    kb._catalog.set(name, {**(kb._catalog.settings()[name] or {}), **value})
    kb.close()
    for mode in ("r", "rw"):
        with pytest.raises(KnowledgeBaseError) as refused:
            make_kb(mode=mode)
        assert str(refused.value) == (
            f"{kb.path} has {said}, which this version does not know; ingest the documents again "
            "into a new folder"
        )
