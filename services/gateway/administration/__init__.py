"""What an operator does to a cluster that runs: over all owners, and to its parts.

Invariant: nothing here asks whose an object is; `identity/rights` lets role admin alone come here.

Imported by the wiring, the application and the admin edge, and by the commands for those who have Redis.
"""
