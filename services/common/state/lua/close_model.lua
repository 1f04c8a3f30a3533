#!lua flags=allow-oom
-- Ends a model that has nothing left to run: all later operations come to the given result.
-- KEYS pending, meta, epoch
-- ARGV epoch, result of all later operations
-- Returns 1 closed (now or before), 0 when operations wait, -1 for a stale epoch
if tonumber(redis.call('GET', KEYS[3]) or 0) ~= tonumber(ARGV[1]) then return -1 end
if redis.call('ZCARD', KEYS[1]) > 0 then return 0 end
redis.call('HSETNX', KEYS[2], 'closed', ARGV[2])
return 1
