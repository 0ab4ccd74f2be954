"""Text to token ids and back: tokenizer, templates, sentences."""
