#!lua flags=allow-oom
-- Notes which trainer a model is on, for the holder of the current epoch, and the epoch of a move.
-- KEYS meta, epoch
-- ARGV trainer id, epoch
-- Returns 1, or -1 for a stale epoch
if tonumber(redis.call('GET', KEYS[2]) or 0) ~= tonumber(ARGV[2]) then return -1 end
local known = redis.call('HGET', KEYS[1], 'trainer')
if known and known ~= ARGV[1] then redis.call('HSET', KEYS[1], 'moved', ARGV[2]) end
redis.call('HSET', KEYS[1], 'trainer', ARGV[1])
return 1
