"""The program: every command, its exit codes, and one line for everything that can go wrong."""

import dataclasses
import io
import json
import re
import shutil
import subprocess
import sys
import types
import unicodedata

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from jaxrag import KnowledgeBase
from jaxrag.cli import main
from jaxrag.cli.account import explained, sources, times_sooner
from jaxrag.cli.output import columns, shorten, table, titled
from jaxrag.engine.reuse import PartReuse
from jaxrag.measure.table import Table
from jaxrag.models.text.printable import printable
from jaxrag.serve.citing import Citation
from jaxrag.serve.conversation import Source

QUESTION = "Who works the salt wells?"
TEXTS = {
    "salt.txt": "The salt wells of Yanjing are worked by hand.",
    "bridge.md": "# The bridge\nA bamboo bridge crosses the river at the wells.",
    "tea.jsonl": '{"text": "Tea bricks were traded for salt.", "id": "tea"}\n',
}
POOL = ["--cache-tokens", "8192"]


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    directory = tmp_path_factory.mktemp("documents")
    for name, text in TEXTS.items():
        (directory / name).write_text(text)
    return directory


@pytest.fixture(scope="module")
def kb(tmp_path_factory, model_dir, documents):
    """A knowledge base made by the program in a process of its own."""
    path = tmp_path_factory.mktemp("kb") / "kb"
    encoders = ("--encoder", "isolated", "--encoder", "after_prefix")
    command = ("ingest", documents, "--kb", path, "--model", model_dir, *encoders)
    sizes = ("--template", "plain", "--chunk-tokens", "64")
    done = in_a_process(*command, *sizes)
    assert done.returncode == 0, done.stderr
    assert "3 documents (0 unchanged, 0 replaced), 3 chunks" in done.stdout
    return path


@pytest.fixture
def copy_of(model_dir, tmp_path):
    """A copy of the model directory to damage."""
    return shutil.copytree(model_dir, tmp_path / "model")


def in_a_process(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "jaxrag", *map(str, arguments)], capture_output=True, text=True
    )


# What works


def test_ask_prints_the_answer_and_its_account(jaxrag, kb):
    """The answer on stdout, alone; beside it what it came from and what it took, in 80 columns."""
    asked = ("ask", QUESTION, "--kb", kb, "--max-new-tokens", 4, *POOL)
    code, out, err = jaxrag(*asked)
    assert code == 0
    answer = json.loads(jaxrag(*asked, "--json")[1])
    assert out == printable(answer["text"], keep="\n\t") + "\n"
    lines = err.splitlines()
    first, *_ = [line for line in lines if line.startswith("[1]")]
    assert first.split()[1:3] == ["salt.txt", "#0"]
    counts = answer["counts"]
    told = " ".join(err.split())
    assert f"turborag: {counts['reused']} of {sum(counts.values())} chunk tokens reused, " in told
    assert re.search(r", cut off at 4 tokens( \([\d.]+ m?s of it compiling\))?$", told)
    assert "note:" not in err
    assert max(map(columns, lines)) <= 80


@pytest.mark.parametrize(("encoding", "sign"), [("utf-8", "█"), ("ascii", "#"), (None, "█")])
def test_what_became_of_the_chunks_is_drawn(encoding, sign):
    counts = {"reused": 996, "recomputed": 0, "encoded": 4}
    rows = [
        PartReuse("prefix", 9, "prefix hit", "pool", 0, ""),
        PartReuse("chunk 0", 996, "chunk hit", "store", 0, ""),
        PartReuse(
            "chunk 1", 4, "encoded", None, 0, "not in kb/kv; it was there once: evicted " * 3
        ),
    ]
    times = {"retrieve": 0.001, "load": 0.02, "compile": 0.0, "ttft": 0.021, "per_token": 0.5}
    found = [types.SimpleNamespace(number=number) for number in (1, 2)]
    result = types.SimpleNamespace(
        counts=counts, reuse=rows, timings=times, flops=5000, indexes={}, sources=found
    )
    drawn, legend, *lines = explained(result, encoding)
    assert drawn.count(sign) == 69 and len(drawn) == 80  # and one column of what was encoded
    assert "reused 996" in legend and "encoded 4" in legend
    assert max(map(len, lines)) <= 80
    shown = " ".join(" ".join(lines).split())
    assert "[1] 996 tokens, chunk hit in the store" in shown
    assert "[2] 4 tokens, encoded: not in kb/kv" in shown
    assert "= 21.0 ms to the first token, then 500.0 ms a token" in shown


def test_sources_have_pages_and_fit():
    source = Source("a-report-with-a-very-long-name-indeed.pdf", 12, None, 3.5, "word " * 40, 7)
    found = [source, dataclasses.replace(source, page=None)]
    cited = [Citation(0, 200, 1, 0.8)]
    result = types.SimpleNamespace(sources=found, citations=cited, text="word " * 40)
    said, first, second = sources(result, given=False)
    assert said.startswith("[1] for 'word word ") and columns(said) <= 80
    assert "#12, p. 7  3.50  word word" in first and "p. 7" not in second
    assert columns(first) == columns(second) == 80


@pytest.mark.parametrize("width", [40, 80])
def test_wide_tables_are_folded(width):
    rows = [["method", *(f"column {i}" for i in range(20))], ["turborag", *map(str, range(20))]]
    lines = list(titled([Table("A title of words. " * 8, rows, names=1)], width))
    shown = "\n".join(lines).splitlines()
    assert max(map(len, shown)) <= width
    assert [int(n) for it in shown if it.startswith("turborag") for n in it.split()[1:]] == [
        *range(20)
    ]


def test_ask_json_is_one_object_with_the_public_names(jaxrag, kb, documents):
    code, out, _ = jaxrag("ask", QUESTION, "--kb", kb, "--max-new-tokens", 4, "--json", *POOL)
    assert code == 0
    assert out.count("\n") == 1
    answer = json.loads(out)
    names = "text token_ids finish_reason method sources timings counts flops reuse indexes notes"
    assert list(answer) == [*names.split(), "citations", "recomputed"] and answer["citations"] == []
    phases = "retrieve wait load compile prefill ttft per_token"
    assert list(answer["timings"]) == phases.split()
    assert list(answer["counts"]) == ["reused", "recomputed", "encoded"]
    source = answer["sources"][0]
    names = "document_id chunk_index file score text page start end number"
    assert list(source) == names.split()
    assert (source["page"], source["start"], source["end"]) == (None, 0, len(source["text"]))
    assert source["file"] == str(documents / "salt.txt")
    assert source["text"] == TEXTS["salt.txt"]
    assert (answer["method"], answer["finish_reason"]) == ("turborag", "length")
    assert len(answer["token_ids"]) == 4
    assert isinstance(answer["flops"], int)


def test_ask_documents_given_on_the_spot(jaxrag, model_dir, documents):
    given = [documents / "salt.txt", documents / "tea.jsonl"]
    asked = ("ask", QUESTION, "--model", model_dir, "--template", "plain", "--json", *POOL)
    code, out, _ = jaxrag(*asked, "--max-new-tokens", 2, "--documents", *given)
    assert code == 0
    sources = json.loads(out)["sources"]
    assert [s["document_id"] for s in sources] == ["documents[0]", "documents[1]"]
    assert sources[1]["text"] == "Tea bricks were traded for salt."
    assert [s["file"] for s in sources] == [str(path) for path in given]
    asked = (*asked[:-3], *POOL, "--explain", "--max-new-tokens", 2, "--documents", *given)
    _, _, shown = jaxrag(*asked)
    assert "[1]  salt.txt #0" in shown and "[2]  tea.jsonl #0" in shown and "[0]" not in shown
    assert "encoded: " in shown and "and kept in memory" in " ".join(shown.split())


@pytest.mark.parametrize("method", ["turborag", "block_attention", "full_reuse"])
def test_what_one_process_ingested_another_one_reuses(jaxrag, kb, method):
    """The fixture's process has ended; this one encodes nothing and has nothing to remark."""
    asked = ("ask", QUESTION, "--kb", kb, "--method", method, "--max-new-tokens", 2, *POOL)
    answer = json.loads(jaxrag(*asked, "--json")[1])
    assert answer["counts"]["encoded"] == answer["counts"]["recomputed"] == 0
    assert answer["counts"]["reused"] > 0
    same = ["block_attention with the template 'plain' is the same as turborag"]
    told = [note.split(":")[0] for note in answer["notes"]]
    assert told == (same if method == "block_attention" else [])


def test_kb_stats_and_list(jaxrag, kb, model_dir, documents):
    code, out, _ = jaxrag("kb", "stats", kb, "--json")
    assert code == 0
    stats = json.loads(out)
    assert (stats["documents"], stats["chunks"], stats["template"]) == (3, 3, "plain")
    assert stats["encoders"] == {"isolated": 3, "after_prefix": 3}
    assert stats["stored"]["chunks"] >= 6
    assert stats["model"] == str(model_dir)
    code, out, _ = jaxrag("kb", "stats", kb)
    assert code == 0
    assert "isolated 3, after_prefix 3" in out
    shown = dict(re.split(r"  +", line, maxsplit=1) for line in out.splitlines())
    assert shown["stored sealed"] == "no" and shown["last gc"] == "none"
    assert int(shown["text tokens"]) == stats["tokens"] < stats["stored"]["tokens"]
    assert "_" not in "".join(shown) and not {"None", "False", "True"} & set(shown.values())
    code, out, _ = jaxrag("kb", "list", kb, "--json")
    assert code == 0
    listed = json.loads(out)["documents"]
    assert [d["id"] for d in listed] == ["bridge.md", "salt.txt", "tea.jsonl/tea"]
    assert listed[0]["title"] == "The bridge"
    code, out, _ = jaxrag("kb", "list", kb)
    assert code == 0
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [
        ["bridge.md", "1"], ["salt.txt", "1"], ["tea.jsonl/tea", "1"],
    ]  # fmt: skip
    assert listed[1]["file"] == str(documents / "salt.txt")
    for action in ("list", "stats"):
        words = jaxrag("kb", action, kb)[1].splitlines()
        assert all(columns(line) <= 80 or " " not in re.split("  +", line)[-1] for line in words)


@pytest.fixture
def own_kb(kb, tmp_path):
    """A copy of the knowledge base to change."""
    return shutil.copytree(kb, tmp_path / "kb")


def test_kb_remove_then_gc(jaxrag, own_kb):
    code, out, err = jaxrag("kb", "remove", own_kb, "tea.jsonl/tea", "coffee")
    assert (code, err) == (3, "")
    assert "removed 1 document, 1 chunk\nno document 'coffee'" in out
    assert jaxrag("kb", "gc", own_kb)[1].startswith("freed 0 chunks")
    dry = json.loads(jaxrag("kb", "gc", own_kb, "--grace", "0s", "--dry-run", "--json")[1])
    assert (dry["chunks"], dry["dry_run"]) == (2, True)  # both encoder variants of it
    code, out, err = jaxrag("kb", "gc", own_kb, "--grace", "0s")
    assert (code, err) == (0, "")
    assert out.startswith("freed 2 chunks")
    stats = json.loads(jaxrag("kb", "stats", own_kb, "--json", "--walk")[1])
    assert stats["documents"] == 2
    assert (stats["stored"]["orphans"], stats["stored"]["corrupt"]) == (0, 0)
    assert stats["last_gc"]["chunks"] == 2
    assert "last gc chunks" in jaxrag("kb", "stats", own_kb)[1]
    again = json.loads(jaxrag("kb", "remove", own_kb, "salt.txt", "--json")[1])
    assert again == {"documents": 1, "chunks": 1, "unknown": [], "neighbours": None}


def test_kb_verify_and_repair(jaxrag, own_kb):
    code, out, _ = jaxrag("kb", "verify", own_kb, "--rate", "1GB")
    rows = "rows of 3 documents: all as written\n"
    assert (code, out) == (0, f"chunks: 6 whole, 0 repaired, 0 damaged\n{rows}")
    with KnowledgeBase.open(own_kb) as kb:  # the prefix is stored too, and in no catalog
        key = min(kb._catalog.all_keys())
    (record,) = (own_kb / "kv").rglob(f"{key}/commit.json")
    record.write_text("{")
    code, out, _ = jaxrag("kb", "verify", own_kb, "--json")
    assert code == 3
    (damaged,) = json.loads(out)["damaged"]
    code, out, _ = jaxrag("kb", "verify", own_kb)
    with KnowledgeBase.open(own_kb) as kb:
        places = {
            key: f"{document.id} #{number}, {encoder}"
            for document in kb.documents()
            for encoder, keys in kb._catalog.keys(document.id).items()
            for number, key in enumerate(keys)
        }
    assert f"damaged: {places[damaged]} ({damaged})\n" in out
    code, out, _ = jaxrag("kb", "verify", own_kb, "--repair", *POOL)
    assert (code, out) == (0, f"chunks: 5 whole, 1 repaired, 0 damaged\n{rows}")


def test_kb_verify_tells_and_repairs_rows_and_settings(jaxrag, own_kb, refused):
    with KnowledgeBase.open(own_kb, mode="rw") as kb:
        connection = kb._catalog._database.connection
        connection.execute("UPDATE chunks SET ids = x'00' WHERE document_id = 'salt.txt'")
        connection.execute("UPDATE documents SET title = 'x' WHERE id = 'tea.jsonl/tea'")
        connection.execute("DELETE FROM lengths")
    code, out, _ = jaxrag("kb", "verify", own_kb)
    assert code == 3
    assert out.splitlines()[2:] == [
        "not as written: chunk salt.txt #0",
        "not as written: document tea.jsonl/tea",
        "1 document that nothing proves: tea.jsonl/tea",
    ]
    rows = json.loads(jaxrag("kb", "verify", own_kb, "--json")[1])["rows"]
    assert rows["lost"] == ["tea.jsonl/tea"]
    assert {fault["kind"] for fault in rows["faults"]} == {"chunk", "document", "word", "total"}
    refused("ask", "Salt?", "--kb", own_kb, *POOL, words="run `jaxrag kb verify --repair")
    code, out, _ = jaxrag("kb", "verify", own_kb, "--repair", *POOL)
    assert code == 3
    assert "1 document lost, add again: tea.jsonl/tea" in out.splitlines()
    with KnowledgeBase.open(own_kb, mode="rw") as kb:
        change = "UPDATE settings SET value = '1' WHERE name = 'max_bytes'"
        kb._catalog._database.connection.execute(change)
    refused("kb", "verify", own_kb, words="the setting 'max_bytes' is not as written")
    code, out, _ = jaxrag("kb", "verify", own_kb, "--repair", *POOL)
    assert code == 0
    assert out.splitlines()[0] == "settings repaired: max_bytes"
    assert jaxrag("kb", "verify", own_kb)[0] == 0


def test_a_secret_is_named_by_its_file_and_asked_for_from_then_on(
    jaxrag, refused, own_kb, documents, tmp_path, monkeypatch
):
    secrets = [tmp_path / name for name in ("secret", "other")]
    for number, path in enumerate(secrets):
        path.write_bytes(bytes([number]) * 32)
    first, other = (("--secret-file", path) for path in secrets)
    code, out, _ = jaxrag("kb", "verify", own_kb, *first)
    assert code == 3
    assert "chunks: 0 whole, 0 repaired, 6 damaged\n6 of the damaged are sound, but not" in out
    assert "\nnot sealed: salt.txt #0, isolated (" in out and "\ndamaged: " not in out
    code, out, _ = jaxrag("ingest", documents, "--kb", own_kb, *first, *POOL)
    assert code == 0
    assert "encoded again, as the store holds them not sealed: 6 chunks\n" in out
    asks = f"{own_kb} is sealed with secret "
    for command in ("stats", "list", "verify", "gc"):
        refused("kb", command, own_kb, words=[asks, "--secret-file or JAXRAG_SECRET_FILE"])
    refused("kb", "remove", own_kb, "tea", words=asks)
    refused("ask", QUESTION, "--kb", own_kb, words=asks)
    refused("kb", "export", own_kb, tmp_path / "out", words=asks)
    refused("kb", "verify", own_kb, *other, words=[asks, "--repair --reseal"])
    refused("kb", "verify", own_kb, *other, "--reseal", words="--reseal without --repair")
    refused("kb", "stats", own_kb, "--secret-file", documents, words="the secret cannot be read")
    monkeypatch.setenv("JAXRAG_SECRET_FILE", str(secrets[0]))
    code, out, _ = jaxrag("kb", "verify", own_kb)
    assert code == 0 and out.startswith("chunks: 6 whole, 0 repaired, 0 damaged\n")
    code, out, err = jaxrag("ask", QUESTION, "--kb", own_kb, "--max-new-tokens", "4", *POOL)
    assert code == 0 and "not sealed" not in out + err
    stored = json.loads(jaxrag("kb", "stats", own_kb, "--walk", "--json")[1])["stored"]
    assert (stored["sealed"], stored["unsealed"]) == (True, 0)
    code, out, _ = jaxrag("kb", "verify", own_kb, "--repair", "--reseal", *other, *POOL)
    assert code == 0 and out.startswith("chunks: 0 whole, 6 repaired, 0 damaged\n")
    refused("kb", "stats", own_kb, words=asks)


def test_warm_is_compared_with_warm(jaxrag, kb):
    _, _, err = jaxrag("ask", QUESTION, "--kb", kb, "--max-new-tokens", 1, "--explain", *POOL)
    assert re.search(r"sooner: asked again, the first token comes after [\d.]+ ms, with full", err)
    assert times_sooner(0.01, 0.05).startswith("5.0x sooner: ")
    assert times_sooner(0.05, 0.01).startswith("not sooner: ")


def test_where_filters_documents(jaxrag, refused, model_dir, tmp_path):
    lines = [{"id": str(year), "text": f"Salt of {year}.", "year": year} for year in (2019, 2020)]
    (tmp_path / "salt.jsonl").write_text("\n".join(map(json.dumps, lines)))
    kb = tmp_path / "kb"
    made = ("--kb", kb, "--model", model_dir, "--template", "plain", "--chunk-tokens", "64")
    assert jaxrag("ingest", tmp_path / "salt.jsonl", *made)[0] == 0
    asked = ("ask", "Which salt?", "--kb", kb, "--max-new-tokens", 2, "--json", *POOL)
    answer = json.loads(jaxrag(*asked, "--where", '{"year": {"$gte": 2020}}')[1])
    assert [source["document_id"] for source in answer["sources"]] == ["salt.jsonl/2020"]
    assert "2019" not in jaxrag("kb", "list", kb, "--where", '{"year": 2020}')[1]
    refused(*asked, "--where", "year=2020", words="--where 'year=2020' is not JSON")
    refused(*asked, "--where", "[1]", words="expected an object")
    refused(*asked, "--where", '{"year": {"$near": 1}}', words="'$near'")


@pytest.mark.parametrize(
    ("command", "option", "text", "words"),
    [
        *(("gc", "--grace", text, "a time such as 30m or 1h") for text in ("", "5", "-1h", "٣h")),
        *(("verify", "--rate", text, "a size such as 200MB or 64GiB") for text in ("5", "5MB/s")),
    ],
)
def test_bad_times_and_sizes_are_bad_usage(jaxrag, kb, command, option, text, words):
    code, out, err = jaxrag("kb", command, kb, f"{option}={text}")
    assert (code, out) == (2, "") and f"expected {words}" in err


@pytest.mark.parametrize("text", ["", "4kB", "-1"])
def test_bad_counts_are_bad_usage(jaxrag, kb, text):
    """One parser wherever tokens are counted."""
    for command in (
        ("ask", QUESTION, "--kb", kb, f"--max-new-tokens={text}"),
        ("ingest", "x", "--kb", kb, f"--chunk-tokens={text}"),
        ("bench", "ttft", f"--contexts=1k,{text or 'many'}"),
        ("eval", "needle", "--model", "m", f"--contexts=1k,{text or 'many'}"),
    ):
        code, out, err = jaxrag(*command)
        assert (code, out) == (2, "")
        assert "expected a number of tokens, as 4096 or 4k" in err
        assert command[-1].split("=")[0] in err


def test_convert_there_and_back(jaxrag, model_dir, tmp_path):
    there, back = tmp_path / "checkpoint", tmp_path / "huggingface"
    code, out, _ = jaxrag("convert", model_dir, there)
    assert (code, out) == (0, f"{there}: jaxrag checkpoint written\n")
    code, out, _ = jaxrag("convert", there, back, "--to", "huggingface")
    assert (code, out) == (0, f"{back}: Hugging Face directory written\n")
    name = "model.safetensors"
    assert (back / name).read_bytes() == (model_dir / name).read_bytes()
    assert (back / "tokenizer.json").read_bytes() == (model_dir / "tokenizer.json").read_bytes()


def test_program_without_a_command_is_bad_usage(jaxrag):
    code, out, err = jaxrag()
    assert (code, out) == (2, "")
    assert "Missing command" in err
    code, out, err = jaxrag("srve")
    assert (code, out) == (2, "") and "'serve'" in err
    assert jaxrag("--help")[0] == 0


# What is refused: before any work, in one line, with nothing half-written


def damage_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def truncate(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def other_tokenizer(directory, size=1000):
    vocabulary = {f"w{i}": i for i in range(size)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text("{}")


DAMAGES = {
    "gone": (shutil.rmtree, "no such model directory"),
    "architecture": (
        lambda d: damage_config(d, architectures=["MambaForCausalLM"], model_type="mamba"),
        "MambaForCausalLM is not supported",
    ),
    "config": (lambda d: (d / "config.json").write_text("{"), "config.json"),
    "no config": (lambda d: (d / "config.json").unlink(), "config.json"),
    "weights": (truncate, "model.safetensors"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "safetensors"),
    "shape": (lambda d: damage_config(d, intermediate_size=44), "44"),
    "large tokenizer": (other_tokenizer, ["999", "600"]),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json"),
    "tokenizer": (lambda d: (d / "tokenizer.json").write_text("{}"), "not a readable tokenizer"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_bad_model_directory(refused, copy_of, documents, tmp_path, damage):
    break_it, words = DAMAGES[damage]
    break_it(copy_of)
    refused("ingest", documents, "--kb", tmp_path / "kb", "--model", copy_of, words=words)
    assert not (tmp_path / "kb").exists()
    asked = ("ask", QUESTION, "--model", copy_of, "--documents", documents / "salt.txt")
    refused(*asked, words=words)


@pytest.mark.parametrize("damage", ["gone", "weights"])
def test_bad_model_is_not_converted(refused, copy_of, tmp_path, damage):
    break_it, words = DAMAGES[damage]
    break_it(copy_of)
    before = sorted(path.name for path in tmp_path.iterdir())
    refused("convert", copy_of, tmp_path / "checkpoint", words=words)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_convert_refuses_a_full_target_and_the_wrong_way(refused, model_dir, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    refused("convert", model_dir, tmp_path / "full", words=["full", "exists already"])
    refused("convert", tmp_path, tmp_path / "new", words="neither a Hugging Face directory nor")
    backwards = ("convert", model_dir, tmp_path / "new", "--to", "huggingface")
    refused(*backwards, words="cannot convert to 'huggingface'")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "content", "words"), [("empty.txt", b"", "empty"), ("latin.txt", b"caf\xe9", "UTF-8")]
)
def test_bad_document(jaxrag, refused, model_dir, tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content)
    refused("ask", QUESTION, "--model", model_dir, "--documents", path, words=[name, words])
    code, out, err = jaxrag("ingest", path, "--kb", tmp_path / "kb", "--model", model_dir)
    assert code == 3
    assert "0 documents" in out
    assert name in err
    assert words in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--method", "turborga"), ["method 'turborga'", "turborag"]),
        (("--template", "turborga"), ["template 'turborga'", "turborag"]),
        (("--template", "missing.toml"), "missing.toml: no such configuration file"),
        (("--k", "0"), "k=0: expected a positive integer"),
        (("--max-new-tokens", "2000"), "the model's context is 1024"),
        (("--temperature", "-1"), "temperature=-1.0"),
        (("--stop", ""), "non-empty strings"),
        (("--mesh", "nonsense"), "--mesh 'nonsense': expected three integers such as 1,1,8"),
        (("--mesh", "1,1,99"), ["tensor=99", "there are"]),
        (("--cache-tokens", "32"), "raise cache_tokens"),
        (("--dtype", "bfloat16"), ["was made in float32", "bfloat16"]),
        (("--model", "nowhere"), "nowhere"),
        (("--documents", "nowhere.txt"), "nowhere.txt: no such file"),
    ],
    ids=" ".join,
)
def test_bad_option_of_ask(refused, kb, arguments, words):
    pool = () if "--cache-tokens" in arguments else POOL
    refused("ask", QUESTION, "--kb", kb, *pool, *arguments, words=words)


def test_bad_questions(refused, kb):
    refused("ask", " ", "--kb", kb, *POOL, words="question is empty")
    long = " ".join(["why"] * 900)
    refused("ask", long, "--kb", kb, *POOL, words=["question tokens", "context is 1024"])
    refused("ask", QUESTION, words="pass --kb DIR, or --documents FILE... and --model DIR")


def test_knowledge_base_that_is_none(refused, model_dir, documents, tmp_path):
    none = tmp_path / "none"
    makes = (
        f"holds no knowledge base; make one with `jaxrag ingest PATH... --kb {none} --model DIR`"
    )
    refused("ask", QUESTION, "--kb", none, words=makes)
    refused("kb", "stats", tmp_path / "none", words="holds no knowledge base")
    refused("kb", "list", tmp_path / "none", words="holds no knowledge base")
    assert not (tmp_path / "none").exists()
    (tmp_path / "file").touch()
    refused("kb", "stats", tmp_path / "file", words="is a file")
    made = ("ingest", documents, "--model", model_dir, "--kb")
    refused(*made, tmp_path / "file", words="is a file")
    refused(*made, "s3://bucket/kb", words="local folder")


def test_knowledge_base_of_another_model(refused, kb, copy_of, documents):
    path = copy_of / "model.safetensors"
    weights = bytearray(path.read_bytes())
    weights[-4:] = np.float32(1.5).tobytes()
    path.write_bytes(weights)
    words = ["belongs to model", str(copy_of), "use its model or ingest into another folder"]
    refused("ask", QUESTION, "--kb", kb, "--model", copy_of, words=words)
    refused("ingest", documents, "--kb", kb, "--model", copy_of, words=words)


# Terminals


@pytest.mark.parametrize("text", ["", "word", "word and a", "北京大学 Yanjing", "a\n b\t c", "谁"])
@pytest.mark.parametrize("width", range(1, 12))
def test_text_is_shortened_to_columns(text, width):
    found, line = shorten(text, width), " ".join(text.split())
    columns = [sum(2 if ord(c) > 0x2E80 else 1 for c in line[:n]) for n in range(len(line) + 1)]
    if columns[-1] <= width:
        assert found == line
    else:
        longest = max(n for n, used in enumerate(columns) if used <= width - 1)
        assert found == line[:longest] + "…"


def test_a_long_text_is_looked_at_as_far_as_it_is_shown(monkeypatch):
    seen = []
    monkeypatch.setattr(
        unicodedata, "east_asian_width", lambda c, known=unicodedata.east_asian_width: (
            seen.append(c) or known(c)
        ),
    )  # fmt: skip
    assert len(shorten("é" * 100_000, 60)) == 60
    assert len(seen) == 61


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_a_terminal_that_cannot_show_the_text_gets_it_escaped(
    model_dir, tmp_path, monkeypatch, encoding
):
    text, name = "北京大学 🎉", "北京.txt"
    (tmp_path / name).write_text(text)
    kb, written = tmp_path / "kb", io.BytesIO()
    assert main(["ingest", str(tmp_path / name), "--kb", str(kb), "--model", str(model_dir)]) == 0
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding, write_through=True))
    assert main(["kb", "list", str(kb), "--json"]) == 0
    [document] = json.loads(written.getvalue().decode(encoding))["documents"]
    assert "北京.txt" in document["id"]
    assert main(["kb", "list", str(kb)]) == 0
    shown = written.getvalue().decode(encoding)
    assert ("北京" in shown) == (encoding == "utf-8")
    assert ("\\u5317\\u4eac.txt" in shown) == (encoding != "utf-8")


@pytest.mark.parametrize("tokens", [10**11, 10**18], ids=str)
def test_a_pool_that_nothing_has_room_for_is_refused(refused, kb, tokens):
    words = [
        f"a pool of {tokens} tokens takes ",
        "more than there is of memory",
        "lower cache_tokens",
    ]
    refused("ask", QUESTION, "--kb", kb, "--cache-tokens", tokens, words=words)


# The model of a knowledge base


def test_a_knowledge_base_that_is_there_needs_no_model(jaxrag, refused, own_kb, tmp_path):
    new = tmp_path / "new.txt"
    new.write_text("Barley is roasted over a slow fire.")
    code, out, err = jaxrag("ingest", new, "--kb", own_kb)
    assert code == 0 and out.startswith("1 document (")
    assert err.startswith("about ") and err.count("\n") == 1
    missing = tmp_path / "none"
    refused("ingest", new, "--kb", missing, words=["no knowledge base yet; pass --model DIR"])
    assert not missing.exists()


def test_a_model_that_moved_is_asked_for(jaxrag, refused, copy_of, tmp_path):
    kb, text = tmp_path / "kb", tmp_path / "salt.txt"
    text.write_text(TEXTS["salt.txt"])
    assert jaxrag("ingest", text, "--kb", kb, "--model", copy_of)[0] == 0
    moved = copy_of.rename(tmp_path / "moved")
    words = [str(copy_of), "is not there any more; pass --model DIR"]
    for command in (("ask", QUESTION, "--kb", kb), ("ingest", text, "--kb", kb)):
        refused(*command, words=words)
    code, _, err = jaxrag("ask", QUESTION, "--kb", kb, "--model", moved, "--max-new-tokens", 1)
    assert code == 0 and "error" not in err


def test_a_name_of_the_hub_says_how_to_fetch_it(refused, tmp_path):
    made = ("ingest", tmp_path, "--kb", tmp_path / "kb", "--model")
    words = "`hf download Qwen/Qwen2.5-7B-Instruct --local-dir Qwen2.5-7B-Instruct`"
    refused(*made, "Qwen/Qwen2.5-7B-Instruct", words=words)
    with pytest.raises(AssertionError, match="hf download"):
        refused(*made, tmp_path / "no" / "where", words="hf download")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b]0;title\x07", r"\x1b[31mred\x1b]0;title\x07"),
        ("two\nrows\r", r"two\nrows\r"),
        ("\x9b31m\u202egnp.exe", r"\x9b31m\u202egnp.exe"),
        ("盐\u3000👩\u200d🚀", "盐\u3000👩\u200d🚀"),
    ],
    ids=["escapes", "line ends", "C1 and direction", "text"],
)
def test_control_characters_are_shown_as_such(text, shown):
    assert printable(text) == shown
    lines = table([["id", "n"], [text, "1"]], right=(1,)).split("\n")
    assert len(lines) == 2
    assert lines[1].startswith(shown)
    assert printable("a\n\tb\x1b", keep="\n\t") == "a\n\tb\\x1b"
