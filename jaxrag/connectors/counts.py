"""What the connector counts, in vLLM's own metrics and log."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

# By key: what is counted. A key with a colon has the reason behind it.
COUNTERS = {
    "requests": "requests that were answered over stored parts",
    "tokens": "prompt tokens that were loaded from the store",
    "bytes": "bytes of keys and values that were loaded from the store",
    "seconds": "seconds from the wish for stored parts to their promise",
    "computed": "requests without stored parts, by reason",
}


class Counts(KVConnectorStats):
    """Sums since they were last given away."""

    def add(self, **values: float) -> None:
        """Add to the sums by keys of COUNTERS, with ":reason" behind "computed"."""
        for key, value in values.items():
            self.data[key] = self.data.get(key, 0) + value

    def reset(self) -> None:
        """Forget them."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> "Counts":
        """The sums of both."""
        self.add(**other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class ConnectorMetrics(KVConnectorPromMetrics):
    """``vllm:jaxrag_<key>_total``, beside vLLM's own of external hits."""

    def __init__(self, config: Any, types: Any, labels: list[str], values: Any) -> None:
        super().__init__(config, types, labels, values)
        self._counters = {
            key: self._counter_cls(
                name=f"vllm:jaxrag_{key}",
                documentation=text,
                labelnames=[*labels, *(["reason"] if key == "computed" else [])],
            )
            for key, text in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what one interval counted."""
        for name, value in transfer_stats_data.items():
            key, _, reason = name.partition(":")
            labels = [*self.per_engine_labelvalues[engine_idx], *([reason] if reason else [])]
            self._counters[key].labels(*labels).inc(value)
