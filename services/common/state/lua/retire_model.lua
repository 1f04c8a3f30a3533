#!lua flags=allow-oom
-- Forgets what is known of a base model but that it is retired.
-- KEYS base models
-- ARGV field of its retirement, when (s), fields that go
redis.call('HDEL', KEYS[1], unpack(ARGV, 3))
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
