-- The completions after a cursor, oldest first; those that were seen are dropped.
-- KEYS completions ('newest' in it keeps the highest cursor, for the next one to be above it)
-- ARGV cursor, most completions, the cursor up to which they were seen
-- Returns {member, cursor, member, cursor, ...}
local newest = redis.call('ZSCORE', KEYS[1], 'newest')
if not newest then return {} end
local seen = math.min(tonumber(ARGV[3]), tonumber(newest) - 1)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', seen))
local found = redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. ARGV[1], '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[2] + 1)
local told = {}
for i = 1, #found, 2 do
  if found[i] ~= 'newest' and #told < 2 * tonumber(ARGV[2]) then
    told[#told + 1] = found[i]
    told[#told + 1] = found[i + 1]
  end
end
return told
