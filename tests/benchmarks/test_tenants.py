"""What the rank test says of times that tell, of times that do not, and of a real server."""

import random

import pytest
from tenants import ARMS, Options, compared, report, run


def test_a_shift_is_noticed_and_none_is_not():
    rng = random.Random(3)
    times = {arm: [rng.gauss(1.0, 0.1) for _ in range(100)] for arm in ARMS}
    times["own"] = [seconds - 0.1 for seconds in times["own"]]
    found = compared(times, {"fresh": 0, "other": 0, "own": 9})
    assert found["other"]["p"] > 0.05 and 0.4 < found["other"]["faster"] < 0.6
    assert found["own"]["p"] < 1e-6 and found["own"]["faster"] > 0.7
    assert [line.split(":")[0] for line in report(found)] == list(ARMS)
    assert found["own"]["reused_tokens"] == 9


@pytest.mark.slow
def test_what_another_tenant_asked_is_not_reused():
    result = run(Options(rounds=3))
    assert all(len(result[arm]["first_token"]) == 3 for arm in ARMS)
    assert result["other"]["reused_tokens"] == result["fresh"]["reused_tokens"]
    assert result["own"]["reused_tokens"] > result["fresh"]["reused_tokens"]
