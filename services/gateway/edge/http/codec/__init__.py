"""The messages of the HTTP edge: bytes to plain data and domain messages, and back.

Invariant: pure; nothing here waits, or asks the application anything.

Imported by the room edge/http.
"""
