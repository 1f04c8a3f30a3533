-- Creates the future of a sample together with its request.
-- KEYS future
-- ARGV request, digest, gateway id, owner
local known = redis.call('HMGET', KEYS[1], 'state', 'digest')
if known[1] then
  if known[2] == ARGV[2] then return 'same' end
  return 'conflict'
end
redis.call('HSET', KEYS[1], 'state', 'pending', 'digest', ARGV[2], 'request', ARGV[1],
  'gateway', ARGV[3], 'owner', ARGV[4])
return 'new'
