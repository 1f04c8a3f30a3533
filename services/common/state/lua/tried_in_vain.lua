#!lua flags=allow-oom
-- Counts how long a model was tried in vain to bring where its journal is; a result of it ends that.
-- KEYS meta, epoch
-- ARGV epoch, pause before this try (ms), 1 when the try was refused, 0 when it failed otherwise
-- Returns {ms, of that ms since a try failed otherwise}, or {-1, -1} for a stale epoch
if tonumber(redis.call('GET', KEYS[2]) or 0) ~= tonumber(ARGV[1]) then return {-1, -1} end
local refused = 0
if ARGV[3] == '0' then
  redis.call('HDEL', KEYS[1], 'refused_ms')
elseif redis.call('HSETNX', KEYS[1], 'refused_ms', 0) == 0 then
  refused = redis.call('HINCRBY', KEYS[1], 'refused_ms', ARGV[2])
end
return {redis.call('HINCRBY', KEYS[1], 'vain_ms', ARGV[2]), refused}
