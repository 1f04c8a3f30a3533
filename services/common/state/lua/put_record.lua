-- Stores a record that is a hash, unless it is there, and counts what it takes.
-- USES held
-- KEYS record, held, expiring
-- ARGV owner, content
-- Returns 1 stored, 0 it is there
if redis.call('HSETNX', KEYS[1], 'record', ARGV[2]) == 0 then return 0 end
local bytes = #ARGV[2] + ENTRY
redis.call('HSET', KEYS[1], 'held', bytes)
hold(ARGV[1], bytes)
return 1
