#!lua flags=allow-oom
-- Deletes a record that is a hash, its places in lists, and what is counted of it.
-- USES held
-- KEYS record, sets and sorted sets that list it, held, expiring
-- ARGV owner, id
hold(ARGV[1], -tonumber(redis.call('HGET', KEYS[1], 'held') or 0))
redis.call('DEL', KEYS[1])
for i = 2, #KEYS - 2 do
  local kind = redis.call('TYPE', KEYS[i])['ok']
  if kind ~= 'none' then redis.call(kind == 'zset' and 'ZREM' or 'SREM', KEYS[i], ARGV[2]) end
end
return 1
