#!lua flags=allow-oom
-- Marks a session as over for its silence, unless it was heard of since, or is over already.
-- KEYS session
-- ARGV last sign of life that the caller saw
local known = redis.call('HMGET', KEYS[1], 'last_heartbeat', 'finished')
if known[1] ~= ARGV[1] or known[2] ~= '0' then return 0 end
redis.call('HSET', KEYS[1], 'finished', 'abandoned')
return 1
