#!lua flags=allow-oom
-- Hands a pending sample from one gateway to another (or to itself).
-- KEYS future
-- ARGV from gateway, to gateway
-- Returns the request; '' when it is resolved or belongs to a third gateway; false when there is no such future
local known = redis.call('HMGET', KEYS[1], 'state', 'gateway', 'request')
if not known[1] then return false end
if known[1] ~= 'pending' or (known[2] ~= ARGV[1] and known[2] ~= ARGV[2]) then return '' end
redis.call('HSET', KEYS[1], 'gateway', ARGV[2])
return known[3]
