-- One page of a sorted set, highest score first.
-- KEYS the set
-- ARGV entries, score and member that the page before ended with ('' = the first page)
-- Returns {count of all, {member, score, ...}}
-- Names are compared byte by byte, as Redis orders them: Lua's own comparison depends on the locale of the server.
local function before(one, other)
  for i = 1, math.min(#one, #other) do
    local a, b = one:byte(i), other:byte(i)
    if a ~= b then return a < b end
  end
  return #one < #other
end

local start = 0
if ARGV[2] ~= '' then
  start = redis.call('ZCOUNT', KEYS[1], '(' .. ARGV[2], '+inf')
  for _, member in ipairs(redis.call('ZREVRANGEBYSCORE', KEYS[1], ARGV[2], ARGV[2])) do
    if not before(member, ARGV[3]) then start = start + 1 end
  end
end
local most = tonumber(ARGV[1])
local found = {}
if most > 0 then found = redis.call('ZREVRANGE', KEYS[1], start, start + most - 1, 'WITHSCORES') end
return {redis.call('ZCARD', KEYS[1]), found}
