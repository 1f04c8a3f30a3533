"""The HTTP edge: what the tinker SDK speaks, translated to and from the application layer."""
