-- One page of a sorted set, highest score first.
-- KEYS the set
-- ARGV entries, score and member that the page before ended with ('' = the first page)
-- Returns {count of all, {member, score, ...}}
local start = 0
if ARGV[2] ~= '' then
  start = redis.call('ZCOUNT', KEYS[1], '(' .. ARGV[2], '+inf')
  for _, member in ipairs(redis.call('ZREVRANGEBYSCORE', KEYS[1], ARGV[2], ARGV[2])) do
    if member >= ARGV[3] then start = start + 1 end
  end
end
local most = tonumber(ARGV[1])
local found = {}
if most > 0 then found = redis.call('ZREVRANGE', KEYS[1], start, start + most - 1, 'WITHSCORES') end
return {redis.call('ZCARD', KEYS[1]), found}
