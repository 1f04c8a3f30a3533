"""Versions of the tinker SDK other than the pinned one."""
