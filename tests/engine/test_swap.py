"""A request's own pages go to host memory and come back bit for bit."""

import numpy as np
import pytest

from jaxrag.engine.swap import swap_in, swap_out


@pytest.mark.parametrize("count", [1, 16, 17])
def test_pages_come_back_as_they_were_and_no_other_page_changes(engine_on, rng, count):
    def job(runner):
        shape = swap_out(runner, [0])[0].shape
        shape = (shape[0], count, *shape[2:])
        content = tuple(rng.standard_normal(shape).astype(np.float32) for _ in range(2))
        pages = rng.permutation(runner.num_pages)[:count]
        others = np.setdiff1d(np.arange(runner.num_pages), pages)
        before = swap_out(runner, others)
        swap_in(runner, pages, content)
        np.testing.assert_array_equal(swap_out(runner, pages), content)
        np.testing.assert_array_equal(swap_out(runner, others), before)

    engine_on(cache_tokens=1024).call(job)
