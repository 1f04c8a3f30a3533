"""A real Prometheus watches a cluster that is worked with."""
