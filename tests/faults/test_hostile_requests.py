"""Hostile requests beside others: `hostile_requests.py` over a real server, for a moment."""

import hostile_requests
import pytest


@pytest.mark.slow
def test_hostile_requests_are_refused_and_stop_nobody():
    result = hostile_requests.run(seconds=3.0, clients=4)
    assert result["bad"] == []
    assert len(result["alone"]) == len(hostile_requests.hostile()) == 11
    assert {it["status"] for it in result["alone"].values()} == {400}
    assert all("\n" not in it["error"] for it in result["alone"].values())
    assert result["flood"]["restarts"] == 0 and result["flood"]["ordinary"]["200"]
