#!lua flags=allow-oom
-- Stores a sampling session that a save makes, which was accepted while there was memory.
-- USES put_sampler
