#!lua flags=allow-oom
-- How long a model has waited for a missing seq_id, from when any dispatcher first saw that it is missing.
-- KEYS meta, epoch
-- ARGV first missing seq_id, epoch
-- Returns milliseconds, or -1 for a stale epoch
if tonumber(redis.call('GET', KEYS[2]) or 0) ~= tonumber(ARGV[2]) then return -1 end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local known = redis.call('HMGET', KEYS[1], 'gap', 'gap_since')
if known[1] == ARGV[1] then return math.max(0, now - tonumber(known[2])) end
redis.call('HSET', KEYS[1], 'gap', ARGV[1], 'gap_since', string.format('%.0f', now))
return 0
