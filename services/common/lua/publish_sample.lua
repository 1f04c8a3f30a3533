-- Resolves the future of a sample, once.
-- KEYS future
-- ARGV result, ttl (s), request id, done channel
-- Returns the gateway that dispatched it, or false when it was not pending
local known = redis.call('HMGET', KEYS[1], 'state', 'gateway')
if known[1] ~= 'pending' then return false end
redis.call('HSET', KEYS[1], 'state', 'done', 'result', ARGV[1])
redis.call('HDEL', KEYS[1], 'request', 'reason')
redis.call('EXPIRE', KEYS[1], ARGV[2])
redis.call('PUBLISH', ARGV[4], ARGV[3])
return known[2]
