-- Creates the future of a sample together with its request.
-- USES held
-- KEYS future, pending samples of the sampling session, held, expiring
-- ARGV request, digest, gateway id, owner, seq, bytes of the largest result,
--      max bytes that all owners hold, max bytes that this one holds
-- Returns {'new' | 'same' | 'conflict' | 'held', gateway that is to dispatch it; '' = none is}
local known = redis.call('HMGET', KEYS[1], 'state', 'digest', 'gateway')
if known[1] then
  if known[2] ~= ARGV[2] then return {'conflict', ''} end
  if known[1] == 'pending' then return {'same', known[3]} end
  return {'same', ''}
end
local bytes = #ARGV[1] + tonumber(ARGV[6]) + ENTRY
if not has_room(ARGV[4], bytes, tonumber(ARGV[7]), tonumber(ARGV[8])) then return {'held', ''} end
hold(ARGV[4], bytes)
redis.call('HSET', KEYS[1], 'state', 'pending', 'digest', ARGV[2], 'request', ARGV[1],
  'gateway', ARGV[3], 'owner', ARGV[4], 'held', bytes)
redis.call('SADD', KEYS[2], ARGV[5])
return {'new', ARGV[3]}
