"""Waiting for results over one subscription.

Invariant: a waiter first is listed and then looks, so nothing that is published in between is missed; nothing
polls.

Imported by dispatch, placement, sampling, the application, the edges and the wiring; imports no room.
"""
