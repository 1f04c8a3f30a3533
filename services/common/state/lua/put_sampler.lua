-- Stores and lists the record of a sampling session, unless it is there, and counts what it takes with its session,
-- until all of them are forgotten (`recount_record.lua`).
-- USES held
-- KEYS record, session, the session's sampling sessions, those on the model's snapshots, held, expiring
-- ARGV owner, content, id, version ('' = of no model)
-- Returns what was there, or nothing
local first = redis.call('GET', KEYS[1])
if first then return first end
redis.call('SADD', KEYS[3], ARGV[3])
if ARGV[4] ~= '' then redis.call('ZADD', KEYS[4], ARGV[4], ARGV[3]) end
redis.call('SET', KEYS[1], ARGV[2])
if redis.call('HEXISTS', KEYS[2], 'record') == 1 then
  local bytes = #ARGV[2] + ENTRY
  redis.call('HINCRBY', KEYS[2], 'held', bytes)
  hold(ARGV[1], bytes)
end
return false
