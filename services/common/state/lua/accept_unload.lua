#!lua flags=allow-oom
-- Accepts the end of a model, which makes room.
-- USES accept
