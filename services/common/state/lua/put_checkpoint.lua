#!lua flags=allow-oom
-- Stores the record of a checkpoint unless one of this or a later version is there, or an earlier one that stays, and
-- counts what it takes.
-- USES held
-- KEYS checkpoints of a model, held, expiring
-- ARGV checkpoint id, record, version, '1' = an earlier one makes way whether it has expired or not, now (s), owner
-- Returns 1 stored, 0 one of this version is there, -1 another one is
local raw = redis.call('HGET', KEYS[1], ARGV[1])
if raw then
  local known = cjson.decode(raw)
  local version, expires = known['version'], known['expires_at']
  if version == tonumber(ARGV[3]) then return 0 end
  local expired = type(expires) == 'number' and expires <= tonumber(ARGV[5])
  if version > tonumber(ARGV[3]) or not (ARGV[4] == '1' or expired) then return -1 end
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
hold(ARGV[6], #ARGV[2] - (raw and #raw or -ENTRY))
return 1
