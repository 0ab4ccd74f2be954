"""Whole runs of a tiny model: they learn, stop, resume bit for bit, and refuse what they must."""

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from refusal import refused

from jaxrag.base.config import config_to_dict
from jaxrag.base.errors import ConfigError, ModelError, TokenizerError, TrainError
from jaxrag.base.sharding import make_mesh
from jaxrag.models.export import export_hf
from jaxrag.models.model import load_model
from jaxrag.models.reading import Reading, read_reading
from jaxrag.models.spec import init_params
from jaxrag.models.text.prompts import read_prompt, template_named
from jaxrag.train.checkpoints import Checkpoints
from jaxrag.train.config import load_config
from jaxrag.train.log import read_metrics
from jaxrag.train.loop import train
from jaxrag.train.start import model_config, set_up

ROOT = Path(__file__).parents[2]


def toml(values):
    lines = (f"{name} = {json.dumps(x)}\n" for name, x in values.items() if x is not None)
    return "".join(lines)


def weights(directory):
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(load_model(directory).params)
    }


def complete(run):
    """Steps of the checkpoints that are written completely."""
    return sorted(int(p.name) for p in (run / "checkpoints").glob("*") if p.name.isdigit())


def assert_same_weights(a, b):
    a, b = weights(a), weights(b)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def test_a_run_learns_and_exports(train_config, tmp_path, model_dir):
    (source,) = train_config().data.sources
    config = train_config(**{
        "optimizer.steps": 12,
        "run.eval_every": 4,
        "run.best": "held/accuracy",
        "data.mode": "both",
        "eval": [{"name": "held", "paths": source.paths, "samples": 6}],
    })  # fmt: skip
    calls = []

    def hook(step, params):
        calls.append((step, params.embed.shape))
        return {"hook": float(step)}

    report = train(config, tmp_path / "run", evaluate=hook, progress=False)
    assert (report.stopped, report.step) == ("finished", 12)
    assert 0.5 < report.packing_efficiency <= 1
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    assert report.loss == pytest.approx(losses[-1])
    curve = {line["step"]: line for line in lines if "held/accuracy" in line}
    assert sorted(curve) == [0, 4, 8, 12]
    assert curve[12]["held/loss"] < curve[0]["held/loss"]
    assert [step for step, _ in calls] == [0, 4, 8, 12]
    assert curve[8]["hook"] == 8.0
    before, after = weights(model_dir), weights(report.model)
    assert {name: x.shape for name, x in before.items()} == {
        name: x.shape for name, x in after.items()
    }
    assert any((before[name] != after[name]).any() for name in before)
    assert Path(report.best, "tokenizer.json").is_file()
    for directory in (report.best, report.model):
        trained = dataclasses.replace(template_named(config.data.template), name="prompt")
        assert read_prompt(directory) == trained
        assert read_reading(directory) == Reading(("reordered",))


LORA = {"lora": {"rank": 4, "alpha": 8.0, "targets": ["q", "v", "down"]}}


@pytest.mark.parametrize("changes", [{}, {**LORA, "data.mode": "both"}], ids=["all", "lora"])
def test_paused_and_resumed_equals_uninterrupted(train_config, tmp_path, changes):
    config = train_config(**changes)
    whole = train(config, tmp_path / "whole", progress=False)
    part = train(config, tmp_path / "parts", stop_after=3, progress=False)
    assert (part.stopped, part.step) == ("paused", 3)
    rest = train(config, tmp_path / "parts", resume=True, progress=False)
    assert (rest.stopped, rest.step) == ("finished", 6)
    assert rest.loss == whole.loss
    assert_same_weights(whole.model, rest.model)
    logs = [
        [(line["step"], line["loss"]) for line in read_metrics(tmp_path / run / "metrics.jsonl")]
        for run in ("whole", "parts")
    ]
    assert logs[0] == logs[1]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, LORA], ids=["all", "lora"])
def test_killed_run_resumes_bit_for_bit(train_values, tmp_path, changes):
    """kill -9 in the middle, --resume: the weights of a run that nobody touched."""
    values = train_values(**{"optimizer.steps": 200, "run.save_every": 3, **changes})
    path = tmp_path / "run.toml"
    path.write_text(as_toml(values), encoding="utf-8")
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "jaxrag", "train", str(path), "--out", str(out), "--resume"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    while not complete(out):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (out / "model").exists()
    last = max(complete(out)) + 4
    again = subprocess.run([*command, "--steps", str(last)], cwd=ROOT, capture_output=True)
    assert again.returncode == 0, again.stderr.decode()
    command[command.index(str(out))] = str(tmp_path / "whole")
    whole = subprocess.run([*command, "--steps", str(last)], cwd=ROOT, capture_output=True)
    assert whole.returncode == 0, whole.stderr.decode()
    assert_same_weights(out / "model", tmp_path / "whole" / "model")


def test_sigterm_saves_and_exits(train_config, tmp_path):
    config = train_config(**{"optimizer.steps": 500, "run.save_every": 0, "run.eval_every": 5})

    def hook(step, params):
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return {}

    report = train(config, tmp_path / "run", evaluate=hook, progress=False)
    assert (report.stopped, report.step, report.model) == ("terminated", 5, None)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    more = train(config, tmp_path / "run", resume=True, stop_after=6, progress=False)
    assert more.step == 6


def test_loss_that_is_not_finite_stops_and_keeps_the_last_checkpoint(train_config, tmp_path):
    settings = {"optimizer.learning_rate": 1e30, "optimizer.clip_norm": 0.0, "run.save_every": 1}
    config = train_config(**settings, **{"optimizer.warmup_steps": 0})
    with refused(TrainError):
        train(config, tmp_path / "run", progress=False)
    assert complete(tmp_path / "run")
    assert not (tmp_path / "run" / "model").exists()


def test_resume_refuses_another_config(train_config, tmp_path):
    out = tmp_path / "run"
    train(train_config(), out, stop_after=1, progress=False)
    with refused(TrainError):
        train(train_config(), out, progress=False)
    changed = train_config(**{"optimizer.learning_rate": 3e-3})
    with refused(TrainError, "0.01"):
        train(changed, out, resume=True, progress=False)
    record = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps({**record, "weights": "other"}))
    with refused(TrainError):
        train(train_config(), out, resume=True, progress=False)
    (out / "run.json").write_text(json.dumps(record))
    often = train_config(**{"run.save_every": 1})
    assert train(often, out, resume=True, stop_after=2, progress=False).step == 2


def test_adapters_of_another_model_are_refused(train_config, tmp_path, model_dir, tiny_config):
    """Of another directory, and of other weights or another shape that stand in the same one."""
    base, out = tmp_path / "base", tmp_path / "run"
    shutil.copytree(model_dir, base)
    config = train_config(**LORA, **{"model.path": str(base)})
    train(config, out, stop_after=1, progress=False)
    elsewhere = train_config(**LORA)
    with refused(TrainError, "' -> '"):
        train(elsewhere, out, resume=True, progress=False)
    shape = tiny_config(vocab_size=600, num_layers=1, max_positions=1024)
    shutil.rmtree(base)
    export_hf(base, init_params(shape, jax.random.key(3)), shape, model_dir)
    with refused(TrainError):
        train(config, out, resume=True, progress=False)


def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(train_config, tmp_path, monkeypatch):
    """In Orbax's words, and in the system's; what was saved goes on to the weights of any run."""
    config = train_config(**LORA)
    whole = train(config, tmp_path / "whole", progress=False)
    save = Checkpoints.save
    for number, full in enumerate((
        ValueError("RESOURCE_EXHAUSTED: Error writing x: No space left on device [os_error 28]"),
        OSError(errno.ENOSPC, "No space left on device"),
    )):  # fmt: skip
        out = tmp_path / f"run-{number}"

        def refuse(self, state, position, metrics=None, full=full):
            if position.step == 4:
                raise full
            save(self, state, position, metrics)

        monkeypatch.setattr(Checkpoints, "save", refuse)
        with pytest.raises(TrainError) as told:
            train(config, out, progress=False)
        assert "No space left on device; what was saved before is whole" in str(told.value)
        assert "\n" not in str(told.value) and complete(out) == [2]
    monkeypatch.setattr(Checkpoints, "save", save)
    assert_same_weights(train(config, out, resume=True, progress=False).model, whole.model)


def test_another_error_of_a_file_is_not_taken_for_a_full_disk(train_config, tmp_path, monkeypatch):
    def refuse(self, *_):
        raise ValueError("something else")

    monkeypatch.setattr(Checkpoints, "save", refuse)
    with pytest.raises(ValueError):
        train(train_config(), tmp_path / "run", progress=False)


def test_questions_that_are_no_rows_are_refused_by_line(train_config, tmp_path, write_rows):
    """What `jaxrag kb questions` holds out, given as rows."""
    held = write_rows([{"id": 1, "question": "Who?", "answers": ["I"]}], "held-out.jsonl")
    config = train_config(**LORA, **{"data.sources": [{"name": "own", "paths": [held]}]})
    with refused(TrainError, "1"):
        train(config, tmp_path / "run", progress=False)


@pytest.mark.slow
def test_lora_trains_adapters_and_exports_the_merged_model(train_config, tmp_path, model_dir):
    config = train_config(**LORA, **{"optimizer.steps": 10})
    report = train(config, tmp_path / "run", progress=False)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert lines[-1]["loss"] < lines[0]["loss"]
    before, after = weights(model_dir), weights(report.model)
    changed = {name for name in before if (before[name] != after[name]).any()}
    assert changed == {".layers.q", ".layers.v", ".layers.down"}


@pytest.mark.parametrize(
    ("setting", "value", "match"),
    [
        ("compute.tensor", 4, "compute.tensor=4"),
        ("compute.fsdp", 16, ""),
        ("compute.data", 3, ""),
        ("model.path", None, ""),
        ("model.max_positions", 0, "max_positions=0"),
    ],
)
def test_mesh_and_model_are_checked_first(train_config, setting, value, match):
    with refused(ConfigError, match):
        set_up(train_config(**{setting: value}))


@pytest.mark.parametrize(
    ("loss", "match"),
    [({}, "[lora]"), ({"lm_weight": 0.5}, "lm_weight=0.5"), ({"objective": "kl"}, "'kl'")],
)
def test_a_teacher_needs_frozen_weights_and_teaches_responses_alone(train_config, loss, match):
    with refused(ConfigError, match):
        train_config(loss={"objective": "distill"} | loss)


def test_a_missing_model_says_what_makes_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with refused(TrainError):
        set_up(load_config("shipped-long"))


def test_a_template_with_markers_that_the_tokenizer_lacks_is_refused(train_config, chat_model_dir):
    stock = {"model.path": str(chat_model_dir), "data.template": "turborag"}
    with refused(TokenizerError, "doc_start"):
        set_up(train_config(**stock))


def test_a_dry_run_takes_the_sizes_from_the_file_until_the_directory_is_there(
    train_config, model_dir, tmp_path
):
    file = {"model.config": str(ROOT / "configs" / "models" / "qwen2-7b.toml")}
    missing = train_config(**file, **{"model.path": str(tmp_path / "qwen")})
    assert model_config(missing, planned=True).num_layers == 28
    with refused(ModelError):
        set_up(missing)
    there = train_config(**file)
    for planned in (True, False):
        with refused(ConfigError, "family=llama"):
            model_config(there, planned)
    own = config_to_dict(model_config(train_config()))
    rope = own.pop("rope")
    same = tmp_path / "same.toml"
    same.write_text(f"{toml(own)}[rope]\n{toml(rope)}")
    assert model_config(train_config(**{"model.config": str(same)})).vocab_size == 600


def test_a_run_may_give_the_model_a_longer_context(train_config):
    before = set_up(train_config()).model
    longer = {"model.max_positions": 3000, "data.row_tokens": 2500}
    setup = set_up(train_config(**longer))
    assert setup.model == dataclasses.replace(before, max_positions=3000)
    assert before.max_positions < 2500 == len(setup.rope.cos)


def test_what_a_run_teaches_to_read(train_config):
    """Block mode in one source is enough; its positions are those of the run."""

    def taught(**changes):
        return train_config(**changes).data.reading.block_positions

    (source,) = train_config().data.sources
    own = {"name": "a", "paths": source.paths}
    assert taught() == taught(**{"data.mode": "both"}) == ("reordered",)
    assert taught(**{"data.positions": "composite"}) == ("composite",)
    assert taught(**{"data.mode": "full"}) == ()
    assert taught(**{"data.sources": [{**own, "mode": "full"}]}) == ()
    assert taught(**{"data.sources": [{**own, "block_share": 0.0}]}) == ()
    mixed = [{**own, "mode": "full"}, {**own, "name": "b"}]
    assert taught(**{"data.sources": mixed}) == ("reordered",)


def test_a_mesh_leaves_no_process_out():
    devices = [types.SimpleNamespace(process_index=index // 2) for index in range(4)]
    with refused(ConfigError, "2"):
        make_mesh(data=2, devices=devices)
    make_mesh(data=2, devices=jax.devices()[:4])


def test_tensorboard_events_are_written(train_config, tmp_path):
    pytest.importorskip("tensorboardX")
    train(train_config(**{"run.tensorboard": True}), tmp_path / "run", stop_after=2, progress=False)
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))


@pytest.mark.slow
def test_checkpoints_keep_the_last_and_the_best(train_config, tmp_path, caplog):
    """Most saves are of steps that were not measured, and a run that goes on knows the best."""
    config = train_config(**{
        "optimizer.steps": 8, "run.save_every": 1, "run.keep": 2, "run.eval_every": 2,
        "run.best": "score",
    })  # fmt: skip
    scores = {4: 0.9, 6: 0.7}
    options = {
        "evaluate": lambda step, _: {"score": scores.get(step, 0.1)},
        "progress": False,
    }
    train(config, tmp_path / "run", stop_after=7, **options)
    assert complete(tmp_path / "run") == [4, 6, 7]
    report = train(config, tmp_path / "run", resume=True, **options)
    assert complete(tmp_path / "run") == [4, 7, 8]
    assert [line for line in caplog.messages if "metric" in line] == []
    assert report.best is not None
    with pytest.raises(AssertionError):
        assert_same_weights(report.best, report.model)


def as_toml(values):
    """Nested plain values as TOML, through inline tables."""

    def write(value):
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k} = {write(v)}" for k, v in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(map(write, value)) + "]"
        return json.dumps(value)

    return "".join(f"{key} = {write(value)}\n" for key, value in values.items())


def test_settings_survive_the_trip_through_the_record(train_config):
    from jaxrag.base.tables import build
    from jaxrag.train.config import TrainConfig, to_dict

    config = train_config()
    assert build(TrainConfig, to_dict(config), "again") == config


def test_the_bar_counts_to_the_step_that_was_asked_for(train_config, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("jaxrag.models.text.progress._SECONDS", 0)  # as if it took long
    train(train_config(), tmp_path / "run", stop_after=2, progress=True)
    shown = capsys.readouterr().err
    assert "2/2" in shown and "/6" not in shown
