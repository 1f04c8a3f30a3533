#!lua flags=allow-oom
-- Replaces the record of a checkpoint by another, or removes it, if it is still the one that the caller saw, and
-- counts what that changes.
-- USES held
-- KEYS checkpoints of a model, held, expiring
-- ARGV checkpoint id, record as seen, new record ('' = none), owner
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
  hold(ARGV[4], -#ARGV[2] - ENTRY)
else
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
  hold(ARGV[4], #ARGV[3] - #ARGV[2])
end
return 1
