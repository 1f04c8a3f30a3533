#!lua flags=allow-oom
-- Makes a gateway one that may have unfinished samples. One that is none does not start.
-- KEYS gateways
-- ARGV id of the gateway
return redis.call('SADD', KEYS[1], ARGV[1])
