"""Documents: read, cut, embedded, indexed, kept in a knowledge base, exported."""
