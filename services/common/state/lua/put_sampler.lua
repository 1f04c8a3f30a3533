-- Stores the record of a sampling session, unless it is there, and counts what it takes with its session, until all of
-- them are forgotten (`recount_record.lua`).
-- USES held
-- KEYS record, session, held, expiring
-- ARGV owner, content
-- Returns what was there, or nothing
local first = redis.call('GET', KEYS[1])
if first then return first end
redis.call('SET', KEYS[1], ARGV[2])
if redis.call('HEXISTS', KEYS[2], 'record') == 1 then
  local bytes = #ARGV[2] + ENTRY
  redis.call('HINCRBY', KEYS[2], 'held', bytes)
  hold(ARGV[1], bytes)
end
return false
