-- The base models, who is drained, and the services that were heard of within their life.
-- KEYS base models, drained, then records and seen of each kind
-- ARGV life (ms)
-- Returns {{field, value, ...} of the base models, {"<kind>:<id>", ...}, {record, ...} of each kind}
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local since = string.format('%.0f', now - tonumber(ARGV[1]))
local found = {redis.call('HGETALL', KEYS[1]), redis.call('ZRANGE', KEYS[2], 0, -1)}
for i = 3, #KEYS, 2 do
  local records = {}
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[i + 1], since, '+inf')) do
    local record = redis.call('HGET', KEYS[i], id)
    if record then records[#records + 1] = record end
  end
  found[#found + 1] = records
end
return found
