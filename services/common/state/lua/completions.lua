-- The completions after a cursor, oldest first; those up to it were seen and are dropped.
-- KEYS completions
-- ARGV cursor, most completions
-- Returns {member, cursor, member, cursor, ...}
local found = redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. ARGV[1], '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[2])
-- The newest stays: the next cursor must be above it.
local newest = redis.call('ZREVRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
if newest then
  local seen = math.min(tonumber(ARGV[1]), tonumber(newest) - 1)
  redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', seen))
end
return found
