#!lua flags=allow-oom
-- Says for a while why a model's operations wait.
-- KEYS queue state
-- ARGV reason, for how long (s)
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
return 1
