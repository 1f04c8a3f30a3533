-- Creates the future of a sample together with its request.
-- KEYS future
-- ARGV request, digest, gateway id, owner
-- Returns {'new' | 'same' | 'conflict', gateway that is to dispatch it; '' = it is resolved, or a conflict}
local known = redis.call('HMGET', KEYS[1], 'state', 'digest', 'gateway')
if known[1] then
  if known[2] ~= ARGV[2] then return {'conflict', ''} end
  if known[1] == 'pending' then return {'same', known[3]} end
  return {'same', ''}
end
redis.call('HSET', KEYS[1], 'state', 'pending', 'digest', ARGV[2], 'request', ARGV[1],
  'gateway', ARGV[3], 'owner', ARGV[4])
return {'new', ARGV[3]}
