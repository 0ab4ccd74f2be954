"""Questions over long contexts."""
