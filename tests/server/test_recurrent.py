"""A knowledge base of a model with recurrent layers, from the command line to the server."""

import json

import jax
import pytest

from jaxrag.cli import main
from jaxrag.models.export import export_hf
from jaxrag.models.model import load_model
from jaxrag.models.spec import init_params

TEXT = "The salt well of Yanjing is {} metres deep. Its brine is boiled in iron pans. "


@pytest.fixture(scope="module")
def hybrid_dir(tmp_path_factory, tiny_config, tokenizer_dir):
    config = tiny_config("qwen3_5", vocab_size=600, max_positions=1024)
    directory = tmp_path_factory.mktemp("model") / "hybrid"
    export_hf(directory, init_params(config, jax.random.key(3)), config, tokenizer_dir)
    return directory


@pytest.fixture
def jaxrag(capsys):
    def run(*args):
        capsys.readouterr()
        code = main([str(it) for it in args])
        return code, *capsys.readouterr()

    return run


def test_chunks_with_maps_are_ingested_asked_counted_verified_and_served(
    jaxrag, tmp_path, hybrid_dir, running
):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(TEXT.format(40 + number))
    kb, texts = tmp_path / "kb", sorted(tmp_path.glob("*.txt"))
    made = ("--kb", kb, "--model", hybrid_dir, "--template", "plain", "--chunk-tokens", 64)
    encoders = ("--encoder", "isolated", "--encoder", "primed")
    code, out, err = jaxrag("ingest", *texts, *made, *encoders, "--json")
    assert code == 0, err
    assert json.loads(out)["encoded"] == 2 * json.loads(out)["chunks"] > 0
    code, out, _ = jaxrag("kb", "stats", kb, "--json")
    stored = json.loads(out)["stored"]
    model = load_model(hybrid_dir)
    layout = model.kv_layout
    assert code == 0 and layout.rows > 8
    assert stored["bytes"] == stored["chunks"] * layout.nbytes(0) + stored["tokens"] * (
        layout.nbytes(1) - layout.nbytes(0)
    )
    answers = {}
    for method in ("turborag", "primed", "full_attention"):
        asked = ("--kb", kb, "--method", method, "--max-new-tokens", 4, "--json")
        code, out, err = jaxrag("ask", "How deep is the well?", *asked)
        assert code == 0, err
        answers[method] = json.loads(out)
        how = {row["how"] for row in answers[method]["reuse"]}
        assert how <= ({"computed"} if method == "full_attention" else {"chunk hit", "prefix hit"})
    code, _, err = jaxrag("ask", "How deep?", "--kb", kb, "--method", "fusionrag")
    assert code != 0 and "recurrent layers" in err and err.count("\n") == 1
    code, out, _ = jaxrag("kb", "verify", kb)
    assert code == 0, out
    with running(model, {"village": kb}) as server:
        body = {"max_tokens": 4, "logprobs": True, "top_logprobs": 2}
        answer = server.chat("How deep is the well?", **body).json()
        assert len(answer["choices"][0]["logprobs"]["content"]) == 4
        assert server.chat("How deep is the well?", **body).json()["choices"] == answer["choices"]
    shards = [it for it in kb.rglob("0") if it.is_file()]
    path = max(shards, key=lambda it: it.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1  # of the maps, which are most of it
    path.write_bytes(data)
    code, out, _ = jaxrag("kb", "verify", kb)
    assert code != 0 and "0 repaired, 1 damaged" in out
    code, out, _ = jaxrag("kb", "verify", kb, "--repair")
    assert code == 0 and "1 repaired, 0 damaged" in out
