"""Curves from metrics files, and the picture of them."""

import json
import sys

import pytest
from refusal import refused

from jaxrag.base.errors import ConfigError, RequestError, TrainError
from jaxrag.measure.evals.plots import Curve, draw_curves, read_curves

image = pytest.importorskip("matplotlib.image")


@pytest.fixture
def a_run(tmp_path):
    """``a_run(name, full=[...], block=[...])``: a folder of metrics, 100 steps a line."""

    def make(name, **curves):
        folder = tmp_path / name
        folder.mkdir()
        lines = [{"step": 50, "loss": 1.0}]
        for i in range(max(map(len, curves.values()), default=0)):
            lines.append({"step": 100 * i, **{f"{k}/accuracy": v[i] for k, v in curves.items()}})
            lines.append({"step": 100 * i, "loss": 1.0, "accuracy": 0.5})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "metrics.jsonl").write_text(text + '{"step": 900, "full/accu')  # cut off
        return folder

    return make


def test_curves_are_read_by_name(a_run):
    runs = [
        ("one", a_run("one", full=[0.9, 0.8], block=[0.5, 0.7])),
        ("two", a_run("two", full=[0])),
    ]
    assert read_curves(runs) == [
        Curve("one", "full", [0, 100], [0.9, 0.8]),
        Curve("one", "block", [0, 100], [0.5, 0.7]),
        Curve("two", "full", [0], [0]),
    ]
    assert [curve.name for curve in read_curves(runs[:1], ["block"])] == ["block"]
    with refused(TrainError, "'block'"):
        read_curves(runs, ["block"])


def test_folders_without_curves_are_refused(a_run, tmp_path):
    with refused(TrainError):
        read_curves([("x", tmp_path)])
    with refused(TrainError):
        read_curves([("x", a_run("bare"))])


def test_the_picture_shows_every_curve(a_run, tmp_path):
    curves = read_curves([
        (name, a_run(name, full=[0.9, 0.8, 0.85], block=[0.5, 0.7, 0.8])) for name in ("a", "b")
    ])  # fmt: skip
    path = tmp_path / "curve.png"
    draw_curves(curves, path)
    both = image.imread(path)
    assert both.shape[:2] == (600, 960)
    draw_curves(curves[:3], path)
    fewer = image.imread(path)
    assert (both != fewer).any()
    for suffix in (".svg", ".pdf"):
        draw_curves(curves, path.with_suffix(suffix))
        assert path.with_suffix(suffix).stat().st_size > 1000


def test_pictures_that_cannot_be_written_are_refused(tmp_path, monkeypatch):
    curve = Curve("a", "full", [0], [0.5])
    with refused(RequestError):
        draw_curves([curve], tmp_path / "x.bmp")
    with refused(RequestError):
        draw_curves([curve], tmp_path / "none" / "x.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with refused(ConfigError):
        draw_curves([curve], tmp_path / "x.png")
