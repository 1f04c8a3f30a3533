-- Creates the future of a sample together with its request, and puts it on the list of the gateway that dispatches it.
-- USES held
-- KEYS future, pending samples of the sampling session, the gateway's samples, held, expiring
-- ARGV request, digest, gateway id, owner, seq, bytes of the largest result,
--      max bytes that all owners hold, max bytes that this one holds, request id, most samples of a gateway
-- Returns {'new' | 'same' | 'conflict' | 'held' | 'full', gateway that is to dispatch it; '' = none is}
local known = redis.call('HMGET', KEYS[1], 'state', 'digest', 'gateway')
if known[1] then
  if known[2] ~= ARGV[2] then return {'conflict', ''} end
  if known[1] == 'pending' then return {'same', known[3]} end
  return {'same', ''}
end
if redis.call('SCARD', KEYS[3]) >= tonumber(ARGV[10]) then return {'full', ''} end
local bytes = #ARGV[1] + tonumber(ARGV[6]) + ENTRY
if not has_room(ARGV[4], bytes, tonumber(ARGV[7]), tonumber(ARGV[8])) then return {'held', ''} end
hold(ARGV[4], bytes)
redis.call('HSET', KEYS[1], 'state', 'pending', 'digest', ARGV[2], 'request', ARGV[1],
  'gateway', ARGV[3], 'owner', ARGV[4], 'held', bytes)
redis.call('SADD', KEYS[2], ARGV[5])
redis.call('SADD', KEYS[3], ARGV[9])
return {'new', ARGV[3]}
