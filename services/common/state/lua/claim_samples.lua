#!lua flags=allow-oom
-- Hands pending samples from one gateway to another (or to itself), as many as there are and as large as it may be.
-- KEYS samples of the gateway that has them, samples of the other one, futures
-- ARGV from gateway, to gateway, most bytes of requests (one alone may have more), request ids
-- Returns for each, as far as it came, the request; '' when it is resolved or belongs to a third gateway; false when
-- there is no such future
local told, bytes = {}, 0
for i = 3, #KEYS do
  local name = ARGV[i + 1]
  local known = redis.call('HMGET', KEYS[i], 'state', 'gateway', 'request')
  if not known[1] then
    told[#told + 1] = false
  elseif known[1] ~= 'pending' or (known[2] ~= ARGV[1] and known[2] ~= ARGV[2]) then
    redis.call('SREM', KEYS[1], name)
    redis.call('SREM', KEYS[2], name)
    told[#told + 1] = ''
  else
    bytes = bytes + #known[3]
    if #told > 0 and bytes > tonumber(ARGV[3]) then break end
    redis.call('HSET', KEYS[i], 'gateway', ARGV[2])
    redis.call('SREM', KEYS[1], name)
    redis.call('SADD', KEYS[2], name)
    told[#told + 1] = known[3]
  end
end
return told
