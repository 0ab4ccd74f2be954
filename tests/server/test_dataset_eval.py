"""A data set put to a server: the answers of this process, and servers that cannot be asked."""

import dataclasses
import json

import pytest
from dataset_fixtures import NQ, write
from refusal import refused

from jaxrag.base.errors import RequestError
from jaxrag.measure.evals.asked import ITEMS
from jaxrag.measure.evals.datasets import http
from jaxrag.measure.evals.datasets.options import DatasetOptions
from jaxrag.measure.evals.datasets.run import run
from jaxrag.measure.evals.datasets.table import DATASETS

METHODS = ("full_attention", "turborag")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sets")


@pytest.fixture(scope="module")
def options(folder, model_dir):
    """NQ-open's fixture in this process, three documents to a question."""
    return DatasetOptions(
        "nq_open", (str(write("nq_open", folder)),), methods=METHODS, documents=3, number=4,
        max_new_tokens=3, model=str(model_dir), out=str(folder / "nq.json"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def server(text_model, folder, running):
    """The URL of `jaxrag serve --template` of NQ-open."""
    template = folder / "nq_open.toml"
    template.write_text(DATASETS["nq_open"].template.toml(), encoding="utf-8")
    with running(text_model, {}, template=str(template), rows=1) as found:
        yield found.url


def lines_of(options):
    with open(options.out + ITEMS, encoding="utf-8") as file:
        return {line["id"]: line for line in map(json.loads, file)}


def test_over_http_the_answers_are_the_same(server, options, folder):
    run(options, progress=False)
    asked = dataclasses.replace(options, model=None, server=server, out=str(folder / "http.json"))
    found = run(asked, progress=False)
    here, there = lines_of(options), lines_of(asked)
    for name, line in there.items():
        for method in METHODS:
            ours, theirs = here[name]["methods"][method], line["methods"][method]
            for what in ("text", "finish_reason", "prompt_tokens", "counts", "flops"):
                assert ours[what] == theirs[what], (name, method, what)
            assert theirs["ttft"] > 0
    assert found["model"]["server"] and found["methods"][1]["reuse"] == 1


def test_a_server_has_neighbours_of_the_prompt_when_asked(server, options, folder):
    asked = dataclasses.replace(
        options, model=None, server=server, methods=("fusionrag",), number=3, out=None
    )
    with refused(RequestError, "'fusionrag'") as it:
        run(asked, progress=False)
    assert "neighbours='prompt'" in str(it.value)
    found = run(dataclasses.replace(asked, neighbours="prompt"), progress=False)
    assert found["neighbours"] == {"from": "prompt", "oracle": True}
    [row] = found["methods"]
    assert any("an oracle" in note for note in row["notes"]) and row["recomputed"] > 0


def test_a_server_with_other_prompts_is_refused(server, folder):
    path = str(write("rgb_en", folder))
    with refused(RequestError, "'nq_open'"):
        run(DatasetOptions("rgb_en", (path,), server=server), progress=False)


def test_a_method_that_the_server_lacks(server, options):
    asked = dataclasses.replace(options, model=None, server=server, methods=("magic",), out=None)
    with refused(RequestError, "--method magic"):
        run(asked, progress=False)


def test_a_server_that_is_down_is_one_line(options):
    asked = dataclasses.replace(options, model=None, server="http://127.0.0.1:9", out=None)
    with refused(RequestError, "--server http") as it:
        run(asked, progress=False)
    assert "\n" not in str(it.value)


def test_a_server_that_goes_leaves_what_is_finished(server, options, folder, monkeypatch):
    out = str(folder / "gone.json")
    asked = dataclasses.replace(options, model=None, server=server, out=out)
    answer, count = http.OverHttp.answer, []

    def dies(self, method, item):
        count.append(item.id)
        if len(set(count)) > 2:
            self._url = "http://127.0.0.1:9"
        return answer(self, method, item)

    with monkeypatch.context() as patch:
        patch.setattr(http.OverHttp, "answer", dies)
        with refused(RequestError, "2") as error:
            run(asked, progress=False)
    assert "\n" not in str(error.value)
    assert len(lines_of(asked)) == 2
    assert run(asked, progress=False)["questions"] == options.number < len(NQ)
