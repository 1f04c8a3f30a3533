-- Keeps a new API key, beside the others or in the place of one, which is still as the caller read it.
-- KEYS records, when they were used, version
-- ARGV new version, most keys, id, record,
--      id of the other one ('' = there is none), its record as it was read, as it is to be ('' = it goes)
-- Returns 'kept', or why not: 'changed', 'full'
local id, record, other = ARGV[3], ARGV[4], ARGV[5]
-- The answer to an earlier try was lost.
if redis.call('HGET', KEYS[1], id) == record then return 'kept' end
if other ~= '' and redis.call('HGET', KEYS[1], other) ~= ARGV[6] then return 'changed' end
local goes = other ~= '' and ARGV[7] == ''
if redis.call('HLEN', KEYS[1]) - (goes and 1 or 0) >= tonumber(ARGV[2]) then return 'full' end
if goes then
  redis.call('HDEL', KEYS[1], other)
  redis.call('HDEL', KEYS[2], other)
elseif other ~= '' then
  redis.call('HSET', KEYS[1], other, ARGV[7])
end
redis.call('HSET', KEYS[1], id, record)
redis.call('SET', KEYS[3], ARGV[1])
return 'kept'
