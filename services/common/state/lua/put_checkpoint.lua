-- Stores the record of a checkpoint unless one of this or a later version is there.
-- KEYS checkpoints of a model
-- ARGV checkpoint id, record, version
-- Returns 1 stored, 0 one of this version is there, -1 a later one is
local known = redis.call('HGET', KEYS[1], ARGV[1])
if known then
  local version = cjson.decode(known)['version']
  if version == tonumber(ARGV[3]) then return 0 end
  if version > tonumber(ARGV[3]) then return -1 end
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
