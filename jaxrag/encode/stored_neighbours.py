"""The KV of neighbours as it is stored: read where it is, computed and kept where it is not."""

import dataclasses
from collections.abc import Sequence

from jaxrag.encode.packed import encode_rows
from jaxrag.errors import StoreError
from jaxrag.models.model import Model
from jaxrag.store import KVStore, Provenance, chunk_key, content_id, context_id
from jaxrag.types import HostArray

OWN_ENCODER = "after_prefix"  # of the KV that stands in front of a chunk (FusionRAG equation 10)


@dataclasses.dataclass
class StoredNeighbours:
    """Gives the KV that chunks have directly behind the prefix, an ``OwnKV``.

    Attributes:
      model: the model. prefix: token ids [P] int32.
      store: where it is read from, and kept when it had to be computed; None computes all of it.
      computed: lengths of the chunks that were computed so far.
    """

    model: Model
    prefix: HostArray
    store: KVStore | None
    computed: list[int] = dataclasses.field(default_factory=list)

    def __call__(self, chunks: Sequence[HostArray]) -> list[HostArray]:
        """The KV [L, 2, T, K, H] of distinct chunks, int32 [T] each."""
        found: dict[int, HostArray] = {}
        records = [self._provenance(ids) for ids in chunks]
        keys = []
        if self.store is not None:
            keys = [
                chunk_key(self.store.fingerprint, it.content_id, it.context_id) for it in records
            ]
            read = self.store.get_many(keys, on_missing="skip")
            for index, key in enumerate(keys):
                if key in read.offsets:
                    start, length = read.offsets[key]
                    found[index] = read.kv[:, :, start : start + length]
        missing = [index for index in range(len(chunks)) if index not in found]
        keep = self.store if self.store is not None and self.store.writable else None
        for at, kv in encode_rows(self.model, self.prefix, [chunks[i] for i in missing]):
            index = missing[at]
            found[index] = kv
            self.computed.append(kv.shape[2])
            if keep is not None:
                try:
                    keep.put(keys[index], kv, record=records[index], replace=True)
                except StoreError:  # it only spares work; who stores the chunk itself is told
                    keep = None
        return [found[index] for index in range(len(chunks))]

    def _provenance(self, ids: HostArray) -> Provenance:
        tokenizer = "" if self.model.tokenizer is None else self.model.tokenizer.digest
        context = context_id(OWN_ENCODER, self.prefix)
        return Provenance(OWN_ENCODER, content_id(tokenizer, ids), context)
