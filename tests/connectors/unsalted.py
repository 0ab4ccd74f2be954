"""The connector without its salts, to show what they are for; imported by vLLM's process."""

from jaxrag.connectors.vllm import JaxragConnector


class Unsalted(JaxragConnector):
    """Pages of stored parts go by their tokens."""

    def _salt(self, request, salt):
        pass
