"""Make the archives and the answers of ``test_bases.py``; no test runs this.

    python tests/formats/make_bases.py

What lies beside this file was made so by commit 47e959d6. It makes what is not there, and writes
over nothing.
"""

import gzip
import io
import json
import os
import shutil
import socket
import tarfile
import tempfile
from pathlib import Path

from test_bases import ANSWERS, FIRST, KINDS, LATER, MODEL, archive, document, seen, unpack

from jaxrag import KnowledgeBase, load_model
from jaxrag.library.retrieve import bm25, packing
from jaxrag.reuse.methods import method_named
from jaxrag.serve.compatibility import gate_subject

EXTRA = "rino-dirow.md"  # added and removed again


def make(name, folder, model):
    """Make a knowledge base in which documents came, changed and left."""
    kind = KINDS[name]
    bm25._MANY_CHUNKS, packing._LOOSE = (1, 1) if name == "packed" else (10_000, 512)
    kb = KnowledgeBase.open(folder, model, **kind.made)
    first, *others = map(document, FIRST)
    other = document(LATER)
    earlier = type(first)(first.id, other.text, title="Earlier", metadata={"letters": 1})
    kb.add([earlier, *others[:-1]])
    if name == "neighbours":
        subject = gate_subject(method_named("fusionrag"), kb.template)
        kb.set_gate("fusionrag", {"ratio": 0.25, "questions": 7, "subject": subject})
    kb.add([document(EXTRA)])
    kb.remove([EXTRA])
    if name == "log":
        kb._catalog.checkpoint = lambda: None
    kb.add([first, others[-1]])
    kb.gc(grace_seconds=0)
    if name == "log":  # what a kill leaves
        copy = folder.with_name(f"{name}-copy")
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*-shm"))
        kb.close()
        shutil.rmtree(folder)
        copy.rename(folder)
    else:
        kb.close()


def pack(folder, path):
    """Write a folder as an archive: the same bytes whenever its files are the same."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for item in [folder, *sorted(folder.rglob("*"))]:
            entry = tar.gettarinfo(item, str(item.relative_to(folder.parent)))
            entry.uid = entry.gid = entry.mtime = 0
            entry.uname = entry.gname = ""
            entry.mode = 0o755 if entry.isdir() else 0o644
            with item.open("rb") if item.is_file() else io.BytesIO() as data:
                tar.addfile(entry, data if item.is_file() else None)
    path.write_bytes(gzip.compress(packed.getvalue(), mtime=0))


def lines_of(answers):
    """As JSON, a line for every kind and step."""
    kinds = (
        f"{json.dumps(name)}: {{\n"
        + ",\n".join(
            f"  {json.dumps(step)}: {json.dumps(seen, ensure_ascii=False)}"
            for step, seen in steps.items()
        )
        + "\n}"
        for name, steps in answers.items()
    )
    return "{" + ",\n".join(kinds) + "}\n"


def main():
    """Make what is not there, and what is answered from it."""
    socket.gethostname = lambda: "host"  # a repository remembers where its owners were opened
    answers = json.loads(ANSWERS.read_text(encoding="utf-8")) if ANSWERS.exists() else {}
    with tempfile.TemporaryDirectory(prefix="formats-") as work:
        os.symlink(MODEL, Path(work, "model"))
        for name in KINDS:
            if archive(name).exists():
                continue
            folder = Path(work, "made", name)
            folder.parent.mkdir(exist_ok=True)
            make(name, folder, load_model(Path(work, "model")))
            pack(folder, archive(name))
            shutil.rmtree(folder)  # its path leads nowhere, as that of an archive
            bm25._MANY_CHUNKS, packing._LOOSE = 10_000, 512
            answers[name] = seen(name, unpack(name, Path(work)), load_model(MODEL))
            print(name, archive(name).stat().st_size)
    ANSWERS.write_text(lines_of({name: answers[name] for name in KINDS}), encoding="utf-8")


if __name__ == "__main__":
    main()
