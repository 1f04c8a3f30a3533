"""What the edges for text have in common: endpoints, event streams, and chats as prompts and answers.

Invariant: nothing here knows a field of a public protocol; every error leaves in the form of the protocol
that was spoken, also in the middle of a stream.

Imported by the edges openai and anthropic.
"""
