#!lua flags=allow-oom
-- KEYS lease
-- ARGV holder, ttl (ms); '0' gives the lease back
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[2] == '0' then return redis.call('DEL', KEYS[1]) end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
