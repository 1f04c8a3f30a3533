#!lua flags=allow-oom
-- Ends a session: its record says so, and it moves from the list of the living to those of the ended.
-- KEYS session, the living, the parked, the over, the ended
-- ARGV session id, now (s), last sign of life that the caller saw ('' = it ends whatever was heard of it, and also when
--      it is over), then fields of its record and their values (none = they say it already)
-- Returns 1, or 0 when it was heard of since, or is over already
if ARGV[3] ~= '' then
  local known = redis.call('HMGET', KEYS[1], 'last_heartbeat', 'finished')
  if known[1] ~= ARGV[3] or known[2] ~= '0' then return 0 end
end
if #ARGV > 3 then redis.call('HSET', KEYS[1], unpack(ARGV, 4)) end
redis.call('ZADD', KEYS[4], 'NX', ARGV[2], ARGV[1])
redis.call('ZADD', KEYS[5], ARGV[2], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
return 1
