"""The store benchmark on tiny chunks: what it measures, checks and prints."""

import json

import pytest
import store_throughput as store
from store_throughput import StoreOptions

from jaxrag.base.errors import RequestError

TINY = {"chunks": 2, "layers": 3, "tokens": 32, "kv_heads": 2, "head_dim": 16, "rounds": 1}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("bench"))
    return store.run(StoreOptions(**TINY, folder=folder))


def test_every_way_is_measured(result):
    assert {"memcpy", "plain read", "safetensors", "verified"} <= set(result["warm"])
    for rates in (*result["warm"].values(), *result["cold"].values(), *result["put"].values()):
        assert 0 < rates["median"] <= rates["best"]
    assert result["bytes"] == 2 * 3 * 2 * 32 * 2 * 16 * 2
    assert json.loads(json.dumps(result)) == result


def test_cold_is_measured_only_where_the_pages_are_gone(result):
    assert bool(result["cold"]) == (result["resident_share_when_cold"] <= 0.01)
    assert "memcpy" not in result["cold"]


def test_the_report_has_a_line_for_each(result):
    lines = list(store.report(result))
    for way in result["warm"]:
        assert any(line.startswith(way) for line in lines)
    assert "plain write and fsync" in lines[-1]


@pytest.mark.parametrize("change", [{"rounds": 0}, {"tokens": -1}, {"folder": "no such folder"}])
def test_sizes_that_cannot_be_measured_are_refused(change):
    with pytest.raises(RequestError):
        StoreOptions(**{**TINY, **change})
