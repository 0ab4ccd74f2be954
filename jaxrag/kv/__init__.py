"""Keys and values: in memory (``cache``) and in a repository (``store``)."""
