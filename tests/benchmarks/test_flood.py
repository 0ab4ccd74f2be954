"""What a flood says of a server, of hand-made records, and a small flood of a real one."""

import pytest
from flood import Options, _outcome, report, run

from jaxrag.measure.bench.serve_records import ServedRequest


def test_what_became_of_a_flood():
    good, late, busy, vague, lost = (ServedRequest(0.0, 2) for _ in range(5))
    for one, first in ((good, 0.5), (late, 3.0)):
        one.came(first, 1)
        one.came(first + 1, 1)
        one.done = True
    busy.status, busy.retry_after, busy.error = 429, 2.0, "busy"
    vague.status, vague.error = 429, "busy"
    lost.error = "gone"
    found = _outcome([good, late, busy, vague, lost], Options(first=1.0))
    assert (found["admitted"], found["refused"], found["others"]) == (2, 2, {"gone": 1})
    assert (found["told"], found["within"]) == (0.5, 0.5)
    nobody = _outcome([lost], Options())
    assert (nobody["told"], nobody["within"], nobody["first_token"]) == (None, None, None)


@pytest.mark.slow
def test_a_flood_refuses_what_it_cannot_take_and_serves_the_rest(tiny_config):
    options = Options(
        seconds=3.0,
        rows=4,
        waiting=4,
        answer=16,
        chunk_tokens=64,
        config=tiny_config(eos_ids=(), vocab_size=512),
        hostile=0.1,
    )
    result = run(options)
    assert result["admitted"] + result["refused"] == result["requests"] and not result["others"]
    assert result["refused"] > result["admitted"] > 0
    assert result["told"] == 1.0
    assert result["served_afterwards"] == 1.0
    assert result["grown_bytes"] < 200 << 20
    refused = {name.split(": ")[1] for name in result["hostile"]}
    assert refused and refused <= {"400", "403", "413", "429", "431"} and result["restarts"] == 0
    assert sum(1 for _ in report(result)) == 6
