-- Counts what cannot be read. When there is no room for a new name, the one that was met longest ago goes.
-- KEYS poison
-- ARGV now (s), most names, ttl (s), then for each: name, reason, how often
for i = 4, #ARGV, 3 do
  local known = redis.call('HGET', KEYS[1], ARGV[i])
  local count = tonumber(ARGV[i + 2]) + (known and tonumber(string.match(known, '^%d+')) or 0)
  if not known and redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[2]) then
    local all, oldest, at = redis.call('HGETALL', KEYS[1]), nil, math.huge
    for j = 1, #all, 2 do
      local met = tonumber(string.match(all[j + 1], '^%d+ (%d+)')) or 0
      if met < at then oldest, at = all[j], met end
    end
    redis.call('HDEL', KEYS[1], oldest)
  end
  redis.call('HSET', KEYS[1], ARGV[i], string.format('%.0f %s %s', count, ARGV[1], ARGV[i + 1]))
end
redis.call('EXPIRE', KEYS[1], ARGV[3])
return 1
