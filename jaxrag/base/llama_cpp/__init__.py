"""llama.cpp in a process of its own: it reads chunks, takes their KV back, and decodes."""
