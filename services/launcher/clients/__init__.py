"""Commands for machines that only use a cluster.

Invariant: nothing here needs more than Python and this package, and nothing is asked but the gateways' HTTP.

Imported by the `tinsmith` command.
"""
