"""Token ids in, token ids out, over the paged pool."""
