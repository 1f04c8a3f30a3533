"""Grammars of constrained samples: what one can be made of, and how long that may take, in the front end and
in the engine's core.

Invariant: one library, XGrammar, makes all grammars. The engine's core has one for all requests, which the
first would choose otherwise; and what this one would pass over in a constraint is refused before.

Imported by the engine; imports nothing of its other rooms.
"""
