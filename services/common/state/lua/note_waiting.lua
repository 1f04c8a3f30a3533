#!lua flags=allow-oom
-- Says why a pending sample is not running ('' = it is).
-- KEYS future
-- ARGV reason
if redis.call('HGET', KEYS[1], 'state') ~= 'pending' then return 0 end
redis.call('HSET', KEYS[1], 'reason', ARGV[1])
return 1
