"""The connector over a store that takes seconds while the file $JAXRAG_SLOW is there."""

import os
import time
from pathlib import Path

from jaxrag.connectors.vllm import JaxragConnector


class Slow(JaxragConnector):
    """Leaves $JAXRAG_SLOW.reading where a read waits."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        if hasattr(self, "_store"):
            slow, read = Path(os.environ["JAXRAG_SLOW"]), self._store.get_many

            def get_many(*args, **kwargs):
                if slow.exists():
                    slow.with_suffix(".reading").touch()
                    time.sleep(2.5)
                return read(*args, **kwargs)

            self._store.get_many = get_many
