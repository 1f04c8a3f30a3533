#!lua flags=allow-oom
-- Has a record that is a hash count for itself alone: what was counted with it is gone.
-- USES held
-- KEYS record, held, expiring
-- ARGV owner
local counted = redis.call('HMGET', KEYS[1], 'record', 'held')
if not (counted[1] and counted[2]) then return 0 end
local bytes = #counted[1] + ENTRY
redis.call('HSET', KEYS[1], 'held', bytes)
hold(ARGV[1], bytes - tonumber(counted[2]))
return 1
