"""The native endpoints, all of which a worker answers."""

PROXIED = ("/generate", "/generate_stream", "/tokenize", "/detokenize")
