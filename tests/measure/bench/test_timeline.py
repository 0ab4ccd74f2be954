import json

import pytest

from jaxrag.cli import main
from jaxrag.engine.progress import MOMENTS
from jaxrag.measure.bench.timeline import PHASES, phases


def test_phases_sum_to_the_whole_whatever_moments_there_are():
    ends = [end for _, end in PHASES]
    every = {end: 10.0 + 2**at for at, end in enumerate(ends)}
    found = phases(10.0, every)
    assert sum(found.values()) == every["received"] - 10.0
    assert found["retrieve"] == every["retrieved"] - every["preparing"]
    in_pool = {name: at for name, at in every.items() if name not in ("read", "staged")}
    assert sum(phases(10.0, in_pool).values()) == every["received"] - 10.0
    early = phases(10.0, every | {"read": 10.5})  # read before it was admitted
    assert early["read, dequantise"] == 0.0 and sum(early.values()) == sum(found.values())
    assert set(MOMENTS) < set(ends)


@pytest.mark.slow  # a server of its own
def test_a_timeline_of_store_and_pool(capsys):
    small = ["--chunk-tokens", "128", "--chunks", "2", "--requests", "4"]
    assert not main(["bench", "timeline", *small, "--json"])
    result = json.loads(capsys.readouterr().out)
    for hit, tier in (("store hit", "store"), ("pool hit", "pool")):
        one = result["hits"][hit]
        assert abs(one["sum_over_whole"] - 1) < 0.05
        assert one["tokens_from"][tier] > 2 * 64
        assert one["phases"]["compute the prefill"] > 0
    assert result["hits"]["pool hit"]["phases"]["copy to the device"] == 0
