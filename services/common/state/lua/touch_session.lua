#!lua flags=allow-oom
-- Notes a sign of life of a session, unless it is over or unknown.
-- KEYS session, the living
-- ARGV time (s), session id
if redis.call('HGET', KEYS[1], 'finished') ~= '0' then return 0 end
redis.call('HSET', KEYS[1], 'last_heartbeat', ARGV[1])
redis.call('ZADD', KEYS[2], ARGV[1], ARGV[2])
return 1
