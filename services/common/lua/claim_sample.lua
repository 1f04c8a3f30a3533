-- Hands a pending sample from one gateway to another (or to itself).
-- KEYS future
-- ARGV from gateway, to gateway
-- Returns the request, or false when it is not pending or belongs to a third gateway
local known = redis.call('HMGET', KEYS[1], 'state', 'gateway', 'request')
if known[1] ~= 'pending' or (known[2] ~= ARGV[1] and known[2] ~= ARGV[2]) then return false end
redis.call('HSET', KEYS[1], 'gateway', ARGV[2])
return known[3]
