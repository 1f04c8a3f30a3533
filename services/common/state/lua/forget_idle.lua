-- Takes a model off the list of models with work, unless something was accepted for it meanwhile.
-- KEYS models with work
-- ARGV model id, score it had when it was seen idle
local score = redis.call('ZSCORE', KEYS[1], ARGV[1])
if score and tonumber(score) == tonumber(ARGV[2]) then return redis.call('ZREM', KEYS[1], ARGV[1]) end
return 0
