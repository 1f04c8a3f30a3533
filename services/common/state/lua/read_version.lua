#!lua flags=no-writes
-- The version of a model that its inflight sessions answer from; nil before the first.
-- KEYS version
return redis.call('GET', KEYS[1])
