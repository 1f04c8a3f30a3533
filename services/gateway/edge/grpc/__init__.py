"""The gRPC edge: the public TinsmithService, translated to and from the application layer."""
