"""The entry point by which vLLM knows the connector by its name."""

import contextlib


def register() -> None:
    """Called by vLLM in each of its processes; imports nothing of the connector yet."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # it was called before
        KVConnectorFactory.register_connector(
            "JaxragConnector", "jaxrag.connectors.vllm", "JaxragConnector"
        )
