-- Replaces the record of a checkpoint by another, or removes it, if it is still the one that the caller saw.
-- KEYS checkpoints of a model
-- ARGV checkpoint id, record as seen, new record ('' = none)
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
if ARGV[3] == '' then redis.call('HDEL', KEYS[1], ARGV[1]) else redis.call('HSET', KEYS[1], ARGV[1], ARGV[3]) end
return 1
