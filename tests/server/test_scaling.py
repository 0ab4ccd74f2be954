"""How many engines are wanted, as a function of what waits for them."""

import pytest

from jaxrag.server.state.scaling import DOWN_AFTER, UP_AFTER, UP_SECONDS, Scaling


def looks(scaling, engines, queued, seconds, start=1.0):
    """What is wanted at every second of so many, while nothing is done about it."""
    return [scaling.wanted(start + at, queued, engines) for at in range(int(seconds) + 1)]


def test_a_queue_that_stays_wants_one_more_once():
    found = looks(Scaling(1, 4), 2, 2 * UP_SECONDS + 1, UP_AFTER)
    assert found == [2] * int(UP_AFTER) + [3]


def test_a_moment_of_work_changes_nothing():
    scaling = Scaling(1, 4)
    assert set(looks(scaling, 2, 100.0, UP_AFTER - 1)) == {2}
    assert scaling.wanted(UP_AFTER + 0.5, 2 * UP_SECONDS, 2) == 2  # no more than it may be
    assert set(looks(scaling, 2, 100.0, UP_AFTER - 1, start=UP_AFTER + 1)) == {2}


def test_engines_without_work_go_one_after_the_other():
    found = looks(Scaling(1, 4), 3, 0.0, DOWN_AFTER)
    assert found == [3] * int(DOWN_AFTER) + [2]


def test_one_stays_while_fewer_would_be_too_few():
    """Half of what makes one more wanted: else it would come back at once."""
    assert set(looks(Scaling(1, 4), 3, UP_SECONDS + 0.1, DOWN_AFTER)) == {3}


@pytest.mark.parametrize(("engines", "queued", "wanted"), [(1, 0.0, 1), (4, 1e9, 4), (0, 0.0, 1)])
def test_the_bounds_hold(engines, queued, wanted):
    assert looks(Scaling(1, 4), engines, queued, DOWN_AFTER + 1)[-1] == wanted


def test_more_than_may_be_go():
    assert Scaling(1, 2).wanted(1.0, 0.0, 5) == 2
