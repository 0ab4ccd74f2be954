"""What all endpoints share: the server's parts, and how a request comes in."""
