#!lua flags=allow-oom
-- Declares every seq_id up to one that was never journaled as used up.
-- KEYS meta, epoch
-- ARGV seq, epoch
if tonumber(redis.call('GET', KEYS[2]) or 0) ~= tonumber(ARGV[2]) then return -1 end
if tonumber(ARGV[1]) > tonumber(redis.call('HGET', KEYS[1], 'floor') or -1) then
  redis.call('HSET', KEYS[1], 'floor', ARGV[1])
end
return 1
