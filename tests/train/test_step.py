"""The compiled step: sharded, accumulated and rematerialised alike, and equal to inference."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import ConfigError
from jaxrag.engine.engine import engine_of
from jaxrag.engine.prompt_inspection import inspect_prompts
from jaxrag.engine.request import Prompt, Request
from jaxrag.measure.evals.gate import kl_divergence
from jaxrag.models.digest import params_digest
from jaxrag.models.export import export_hf
from jaxrag.models.hf import load_hf
from jaxrag.models.model import load_model
from jaxrag.models.spec import by_name, init_params
from jaxrag.reuse.methods import METHODS
from jaxrag.train.config import OptimizerPart
from jaxrag.train.lora import init_adapters, merge_all
from jaxrag.train.packing import RESPONSE, Packer, lay_piece
from jaxrag.train.samples import Final, TrainSample
from jaxrag.train.start import set_up
from jaxrag.train.step import decays, learning_rate, make_evaluation, make_optimizer, make_step
from jaxrag.train.stream import SampleStream


def few_steps(config, count=4):
    """Losses and gradient norms of the first steps, the state after them, the step's cache size."""
    setup = set_up(config)
    stream = SampleStream(config.data, setup.tokenizer, setup.end_id, setup.model.max_positions)
    state, frozen = setup.first_state(), setup.frozen()
    step = make_step(config, setup.program, setup.shardings)
    found = []
    for data in itertools.islice(stream.steps(stream.start()), count):
        batch = setup.place(data.batch, config.compute.accumulate)
        state, metrics = step(state, frozen, setup.rope, batch)
        found.append([float(metrics.loss), float(metrics.grad_norm), float(metrics.accuracy)])
    return np.array(found), state, step._cache_size()  # read here: between tests it is emptied


@pytest.fixture
def settings():
    return {"data.mode": "both", "data.rows": 8, "loss.lm_weight": 0.5}


_usual = []


@pytest.fixture
def usual(train_config, settings):
    """What ``few_steps`` gives with ``settings`` alone; run by the first test that asks."""
    if not _usual:
        _usual.append(few_steps(train_config(**settings)))
    return _usual[0]


def test_sharded_equals_one_device(train_config, settings, usual):
    """Law 11: data, fsdp and tensor splits change nothing but where things lie."""
    expected, state, _ = usual
    split = {"compute.data": 2, "compute.fsdp": 2, "compute.tensor": 2}
    found, sharded, _ = few_steps(train_config(**settings, **split))
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    weight = sharded.trained.layers.gate
    assert len({shard.index for shard in weight.addressable_shards}) == 4  # fsdp x tensor
    moments = jax.tree.leaves(sharded.optimizer)
    assert any(len({str(s.index) for s in m.addressable_shards}) == 4 for m in moments)
    np.testing.assert_allclose(weight, state.trained.layers.gate, rtol=1e-2, atol=1e-4)


def test_experts_are_sharded_alike(train_config, settings, tiny_config, tokenizer_dir, tmp_path):
    config = tiny_config("gpt_oss", vocab_size=600, num_layers=1, window_layers=None)
    config = dataclasses.replace(config, experts=dataclasses.replace(config.experts, count=4))
    export_hf(tmp_path / "x", init_params(config, jax.random.key(3)), config, tokenizer_dir)
    settings |= {"model.path": str(tmp_path / "x"), "compute.remat": "dots"}
    split = {"compute.data": 2, "compute.fsdp": 2, "compute.tensor": 2}
    one, state, _ = few_steps(train_config(**settings), 2)
    found, sharded, _ = few_steps(train_config(**settings, **split), 2)
    assert one[0, 0] > one[1, 0]
    np.testing.assert_allclose(found, one, rtol=1e-4)
    layers, spread = state.trained.layers, sharded.trained.layers
    assert len({shard.index for shard in spread.gate.addressable_shards}) == 4  # fsdp x tensor
    for name in ("gate", "router", "sink_logits"):
        start = init_params(config, jax.random.key(3)).layers
        ours, moved = getattr(spread, name), getattr(layers, name)
        assert np.abs(moved - getattr(start, name)).max() > 1e-3
        np.testing.assert_allclose(ours, moved, rtol=1e-2, atol=1e-4)
    with refused(ConfigError, "does not divide the model's 4 experts"):
        set_up(train_config(**settings, **{"compute.tensor": 3}))


FAMILIES = ("mixtral", "gemma3", "gpt_oss", "qwen3_moe", "olmo3", "granite", "smollm3")


@pytest.mark.parametrize("trained", ["blocks", "adapters"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_exported_and_trained(
    train_config, settings, tiny_config, tokenizer_dir, tmp_path, family, trained
):
    layers = {"window_layers": (True, False)} if family == "gpt_oss" else {}
    config = tiny_config(family, vocab_size=600, num_layers=2, **layers)
    params = init_params(config, jax.random.key(3))
    export_hf(tmp_path / "x", params, config, tokenizer_dir)
    found, loaded, _ = load_hf(tmp_path / "x")
    assert dataclasses.replace(found, eos_ids=config.eos_ids, bos_id=config.bos_id) == config
    assert params_digest(loaded) == params_digest(params)
    settings |= {"model.path": str(tmp_path / "x"), "data.rows": 2}
    if trained == "adapters":
        settings |= {"lora": {"rank": 2, "alpha": 2.0, "targets": ["q", "v", "o"]}}
        if config.experts is not None:
            bad = {**settings["lora"], "targets": ["q", "up"]}
            with refused(ConfigError, "up"):
                set_up(train_config(**{**settings, "lora": bad}))
    losses, state, _ = few_steps(train_config(**settings), 2)
    assert np.isfinite(losses).all()
    assert losses[:, 1].min() > 0
    moments = jax.tree.leaves(state.optimizer)
    assert all(np.isfinite(it).all() for it in moments)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"compute.remat": "full", "compute.accumulate": 4}, marks=pytest.mark.slow),
        pytest.param({"compute.remat": "dots"}, marks=pytest.mark.slow),
        {"compute.remat": "attention", "compute.accumulate": 4, "loss.logits_tokens": 100},
    ],
)
def test_accumulation_and_remat_change_nothing(train_config, settings, usual, change):
    found, _, _ = few_steps(train_config(**settings, **change), 2)
    np.testing.assert_allclose(found, usual[0][:2], rtol=1e-4)


def test_what_is_kept_for_the_backward_pass(train_config, settings):
    """Products and what attention put out are kept by name, or computed again."""

    def kept(remat):
        setup = set_up(train_config(**settings, **{"compute.remat": remat}))
        packer = Packer(2, 200)
        assert packer.add([lay_piece(SAMPLE, False, "reordered")])
        batch = setup.place(packer.batch(), None)

        def gradient(trained):
            return jax.vjp(
                lambda w: setup.program.hidden(w, None, setup.rope, batch.tokens), trained
            )[1]

        leaves = jax.tree.leaves(jax.eval_shape(gradient, setup.first_state().trained))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    none, dots, attention, full = (kept(r) for r in ("none", "dots", "attention", "full"))
    assert full < attention < 0.7 * dots
    assert none == dots if jax.default_backend() == "cpu" else none > dots


def test_one_compilation_serves_both_modes_and_every_batch(usual):
    found, _, programs = usual
    assert len(found) == 4
    assert programs == 1


def test_bfloat16_is_close_and_masters_stay_float32(train_config, settings, usual):
    found, state, _ = few_steps(train_config(**settings, **{"compute.dtype": "bfloat16"}), 2)
    np.testing.assert_allclose(found[:, :2], usual[0][:2, :2], rtol=0.03)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.trained)} == {jnp.dtype("float32")}


@pytest.mark.slow
def test_sum_reduction_counts_every_token(train_config, settings, usual):
    summed, _, _ = few_steps(train_config(**settings, **{"loss.reduction": "sum"}), 1)
    assert summed[0, 0] > 20 * usual[0][0, 0]


def test_adapters_start_as_the_model_and_merge_exactly(train_config, settings, usual):
    lora = {"lora": {"rank": 3, "alpha": 6.0, "targets": ["q", "k", "v", "o", "gate", "down"]}}
    config = train_config(**settings, **lora)
    found, state, _ = few_steps(config, 3)
    np.testing.assert_allclose(found[0, 0], usual[0][0, 0], rtol=1e-5)
    assert found[2, 0] < found[0, 0]
    setup = set_up(config)
    adapted, _ = logits_of(setup, state.trained, setup.frozen())
    merged_setup = set_up(train_config(**settings))
    whole = merge_all(setup.frozen(), state.trained, 2.0)
    merged, _ = logits_of(merged_setup, whole, None)
    np.testing.assert_allclose(adapted, merged, rtol=1e-4, atol=1e-4)


LORA = {"lora": {"rank": 3, "alpha": 6.0, "targets": ["q", "k", "v", "o"]}}


def test_adapters_learn_block_mode_from_full_attention(train_config, settings):
    """The loss is the KL divergence of block mode from the frozen weights' full mode."""
    distill = {"loss.objective": "distill", "loss.lm_weight": 0.0, "optimizer.steps": 24}
    config = train_config(**{**settings, **LORA, **distill, "data.rows": 2})
    setup = set_up(config)
    adapters, frozen = setup.first_state().trained, setup.frozen()
    scored = [slice(a, b) for a, b in lay_piece(SAMPLE, False, "reordered").questions]
    full, block = (
        np.concatenate([logits_of(setup, adapters, frozen, it)[0][a] for a in scored])
        for it in (True, False)
    )
    packer = Packer(1, 200)
    assert packer.add([lay_piece(SAMPLE, False, "reordered")])
    batch = setup.place(packer.batch(), None)
    found = make_evaluation(setup.program)(adapters, frozen, setup.rope, batch)
    here = np.asarray(batch.kinds) == RESPONSE
    np.testing.assert_allclose(found.loss[here], kl_divergence(full, block), rtol=1e-3, atol=1e-6)
    packer = Packer(1, 200)
    assert packer.add([lay_piece(SAMPLE, True, "reordered")])
    batch = setup.place(packer.batch(), None)
    found = make_evaluation(setup.program)(adapters, frozen, setup.rope, batch)
    np.testing.assert_allclose(found.loss[here], 0, atol=1e-6)
    losses, _, _ = few_steps(config, 24)
    assert losses[-4:, 0].mean() < 0.7 * losses[:2, 0].mean()


def test_adapters_have_the_shapes_of_their_targets(train_config):
    config = train_config(**{"lora": {"rank": 2, "alpha": 2.0, "targets": ["o", "up"]}})
    setup = set_up(config)
    adapters = init_adapters(setup.model, config.lora, jax.random.key(0))
    m = setup.model
    assert adapters["o"].a.shape == (m.num_layers, m.num_heads, m.head_dim, 2)
    assert adapters["o"].b.shape == (m.num_layers, 2, m.model_dim)
    assert adapters["up"].b.shape == (m.num_layers, 2, m.mlp_dim)


RNG = np.random.default_rng(5)


def some_ids(count):
    return RNG.integers(5, 600, count).astype(np.int32)


SAMPLE = TrainSample(
    prefix=some_ids(6),
    chunks=(some_ids(20), some_ids(33), some_ids(9)),
    finals=(Final(some_ids(7), some_ids(4)), Final(some_ids(5), some_ids(3))),
)


def logits_of(setup, trained, frozen, full=False, positions="reordered"):
    """Logits [T, V] of SAMPLE, which shares its row with another one; and where it starts."""
    piece = lay_piece(SAMPLE, full, positions)
    other = lay_piece(
        TrainSample(some_ids(3), (some_ids(40),), (Final(some_ids(4), some_ids(2)),)),
        not full,
        "reordered",
    )
    packer = Packer(2, 200)
    assert packer.add([other, piece, piece, other])
    batch = setup.place(packer.batch(), None)
    row = next(r for r, members in enumerate(packer.members) if members[0] is not piece)
    at = len(packer.members[row][0])

    @jax.jit
    def run(trained, frozen, rope, batch):
        hidden, head = setup.program.hidden(trained, frozen, rope, batch.tokens)
        return hidden @ (head.T if setup.program.unembedding[0] else head)

    logits = run(trained, frozen, setup.rope, batch)
    return np.asarray(logits[row, at : at + len(piece)]), at


def last_logits(runner, state, there):
    return np.asarray(there.logits)[0]


@pytest.mark.parametrize(
    ("method", "full", "positions", "scales"),
    [
        ("full_attention", True, "reordered", {}),
        ("turborag", False, "reordered", {}),
        ("turborag_composite", False, "composite", {"logit_scale": 1.7, "residual_scale": 0.6}),
    ],
)
def test_training_forward_equals_cached_inference(
    train_config, text_model, method, full, positions, scales
):
    """Law 2: chunks encoded alone and read from the cache give the logits that were trained."""
    setup = set_up(train_config())
    if scales:
        config = dataclasses.replace(setup.model, **scales)
        setup = dataclasses.replace(
            setup, program=dataclasses.replace(setup.program, config=config)
        )
        text_model = dataclasses.replace(text_model, config=config)
    logits, _ = logits_of(setup, setup.first_state().trained, None, full, positions)
    at = SAMPLE.num_shared
    for final in SAMPLE.finals:
        asked = at + len(final.question)
        for answered in (0, len(final.response) - 1):
            ids = np.concatenate((final.question, final.response[:answered]))
            prompt = Prompt(SAMPLE.prefix, SAMPLE.chunks, ids)
            request = Request(prompt, engine_of(text_model).memory, METHODS[method], 1)
            [cached] = inspect_prompts(engine_of(text_model), [request], last_logits)
            np.testing.assert_allclose(logits[asked + answered - 1], cached, rtol=1e-3, atol=2e-4)
        at += len(final)


def test_norms_and_biases_do_not_decay(train_config):
    setup = set_up(train_config())
    mask = decays(setup.like_state().trained)
    assert mask.embed and mask.layers.q and mask.layers.down
    assert not mask.final_norm and not mask.layers.attn_norm and not mask.layers.mlp_norm


def test_what_writes_into_the_stream_has_a_rate_of_its_own(train_config):
    weights = set_up(train_config()).first_state().trained
    gradient = jax.tree.map(jnp.ones_like, weights)
    part = OptimizerPart(steps=10, learning_rate=1.0)
    updates = []
    for rule in (part, dataclasses.replace(part, residual_rate=0.25)):
        optimizer = make_optimizer(rule)
        updates.append(jax.jit(optimizer.update)(gradient, optimizer.init(weights), weights)[0])
    usual, slower = updates
    for name in ("o", "down"):
        np.testing.assert_allclose(
            getattr(slower.layers, name), 0.25 * getattr(usual.layers, name), rtol=1e-6
        )
    np.testing.assert_array_equal(slower.layers.q, usual.layers.q)
    np.testing.assert_array_equal(slower.embed, usual.embed)


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55]),
        ("cosine", [0.5, 1.0, 1.0, 0.8682, 0.55]),
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_schedule(decay, expected):
    part = OptimizerPart(steps=10, learning_rate=1.0, warmup_steps=2, decay=decay, final_share=0.1)
    rate = learning_rate(part)
    found = [float(rate(step)) for step in (0, 1, 2, 4, 6)]
    np.testing.assert_allclose(found, expected, atol=1e-3)
    assert float(rate(10)) == pytest.approx(1.0 if decay == "constant" else 0.1)


@pytest.fixture
def recurrent(train_config, tiny_config, tokenizer_dir, tmp_path):
    model = tiny_config("qwen3_5", vocab_size=600, num_layers=2)
    export_hf(tmp_path / "x", init_params(model, jax.random.key(3)), model, tokenizer_dir)
    values = {"model.path": str(tmp_path / "x"), "data.mode": "both", "data.rows": 4}
    return lambda **changes: train_config(**values, **changes)


@pytest.mark.parametrize("full", [True, False])
def test_packed_rows_are_those_of_a_prompt_alone(recurrent, full):
    """Behind another sample, with two questions that do not see each other, over several tiles."""
    setup = set_up(recurrent())
    packed, _ = logits_of(setup, setup.first_state().trained, None, full)
    model, piece = load_model(recurrent().model.path), lay_piece(SAMPLE, full, "reordered")
    number = 0
    for start, end in piece.questions:
        final = SAMPLE.finals[number]
        before = SAMPLE.num_shared + sum(map(len, SAMPLE.finals[:number]))
        at = np.r_[: SAMPLE.num_shared, before : before + len(final)]
        rows = (it[at][None] for it in (piece.ids, piece.positions, piece.segments))
        alone = np.asarray(model.logits(*rows))[0]
        found = packed[np.r_[: SAMPLE.num_shared, before : before + len(final)]]
        np.testing.assert_allclose(found, alone, rtol=1e-3, atol=2e-4)
        assert before <= start < end <= before + len(final)
        number += 1
    assert number == 2


def test_it_learns_and_is_sharded_and_computed_again_alike(recurrent):
    found, state, programs = few_steps(recurrent(), 6)
    assert programs == 1 and found[-1, 0] < 0.8 * found[0, 0]
    start = by_name(load_hf(recurrent().model.path)[1])
    for name, weight in by_name(state.trained).items():
        assert np.abs(np.asarray(weight) - np.asarray(start[name])).max() > 1e-3, name
    split = {"compute.data": 2, "compute.fsdp": 2, "compute.tensor": 2, "compute.remat": "full"}
    other, _, _ = few_steps(recurrent(**split), 2)
    np.testing.assert_allclose(other, found[:2], rtol=1e-3)
