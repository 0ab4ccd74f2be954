"""Where a question looks, beside the sums over a prompt that is computed whole."""

import jax.numpy as jnp
import numpy as np
import pytest
from chunk_attention import AttentionOptions, report, run
from dataset_fixtures import write

from jaxrag.base.types import FINAL
from jaxrag.measure.evals.datasets.near import NearStudy, passages_of
from jaxrag.measure.evals.datasets.options import NearOptions
from jaxrag.measure.evals.datasets.run import items_of
from jaxrag.models.decoder import forward
from jaxrag.models.model import load_model
from jaxrag.models.taps import ChunkMassAttend
from jaxrag.reuse.select.base import in_order
from jaxrag.serve.questions import prepare


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return str(write("nq_open", tmp_path_factory.mktemp("attention")))


@pytest.fixture(scope="module")
def result(data, model_dir, tmp_path_factory):
    figure = tmp_path_factory.mktemp("figure") / "attention.png"
    options = AttentionOptions(str(model_dir), data, number=1, passages=3, template="plain",
                               methods=("full_reuse",), figure=figure)  # fmt: skip
    found = run(options)
    assert figure.read_bytes().startswith(b"\x89PNG")
    return found


def test_full_attention_looks_where_the_whole_prompt_does(result, data, model_dir):
    near = NearOptions("nq_open", (data,), model=str(model_dir), documents=3, template="plain")
    model = load_model(str(model_dir))
    study, [item, *_] = NearStudy.open(near, model), items_of(near)
    prompt = prepare(study.full, item.question, passages_of(item, model, 256)).prompt
    columns = [-1] * len(prompt.prefix)
    for chunk, ids in enumerate(prompt.chunks):
        columns += [2 * chunk, *[2 * chunk + 1] * (len(ids) - 1)]
    ids = np.concatenate([prompt.prefix, *prompt.chunks, prompt.final])[None]
    columns = np.array([columns + [-1] * len(prompt.final)])
    decoder = model.decoder(ids.shape[1])
    attend = ChunkMassAttend(model.config, decoder.rope, jnp.asarray(columns))
    tokens = in_order(jnp.asarray(ids), jnp.full(ids.shape, FINAL))
    sums = jnp.zeros((*ids.shape, 2 * len(prompt.chunks)), jnp.float32)
    _, sums, _ = forward(decoder.params, model.config, tokens, sums, attend)
    mean = np.asarray(sums)[0, -len(prompt.final) :].mean(0) / model.config.num_layers
    firsts, rest = mean.reshape(-1, 2).T
    whole, reused = result["rows"]
    assert [it["value"] for it in whole["first_tokens"]] == pytest.approx(firsts, abs=1e-6)
    assert [it["value"] for it in whole["passages"]] == pytest.approx(firsts + rest, abs=1e-6)
    assert [it["value"] for it in reused["passages"]] != pytest.approx(firsts + rest, abs=1e-6)


def test_a_line_for_each_method(result):
    lines = report(result)
    assert [line.split()[0] for line in lines] == ["full_attention", "full_reuse"]
    assert f"{100 * result['rows'][0]['passages'][0]['value']:.1f}" in lines[0]
