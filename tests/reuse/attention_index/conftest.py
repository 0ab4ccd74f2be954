"""A small head whose queries and keys differ in distribution, and its exact answers."""

import dataclasses

import numpy as np
import pytest

GROUP = 2
HEAD_DIM = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Head:
    keys: np.ndarray  # [S, H]
    train: np.ndarray  # [G, m, H]
    test: np.ndarray  # [G, n, H]

    def best(self, queries, k):
        """Rows of the k best keys of every query [n, H], by scoring all of them."""
        return np.argsort(-(queries.astype(np.float64) @ self.keys.T.astype(np.float64)), 1)[:, :k]


def make_head(count=600, train=256, test=20, seed=0):
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((8, HEAD_DIM))  # queries live near 8 directions
    keys = rng.standard_normal((count, HEAD_DIM)) * np.arange(1, HEAD_DIM + 1) ** -0.4

    def draw(n):
        noise = 0.5 * rng.standard_normal((GROUP, n, HEAD_DIM))
        return (hidden[rng.integers(8, size=(GROUP, n))] + noise).astype(np.float32)

    return Head(keys.astype(np.float32), draw(train), draw(test))


@pytest.fixture(scope="session")
def head():
    return make_head()


def recall(ids, exact):
    """Mean share of the exact rows [n, k] among the found ones [n, >= k]."""
    return np.mean([len(set(a) & set(b)) / len(b) for a, b in zip(ids, exact, strict=True)])


@pytest.fixture(scope="session")
def recall_of():
    return recall
