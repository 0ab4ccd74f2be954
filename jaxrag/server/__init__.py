"""HTTP over the engine: OpenAI's endpoints, documents, a page for people, and operation."""
