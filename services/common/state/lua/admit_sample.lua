-- Puts a sample on the list of those that a gateway dispatches, unless the list is full.
-- KEYS the gateway's samples
-- ARGV request id, most samples
if redis.call('SISMEMBER', KEYS[1], ARGV[1]) == 1 then return 1 end
if redis.call('SCARD', KEYS[1]) >= tonumber(ARGV[2]) then return 0 end
return redis.call('SADD', KEYS[1], ARGV[1])
