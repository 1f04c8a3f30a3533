-- Lists a model as one of its session's, unless the session is over: its end takes down what is listed by then.
-- KEYS session, the session's models
-- ARGV model id
local finished = redis.call('HGET', KEYS[1], 'finished')
if finished and finished ~= '0' then return 0 end
redis.call('SADD', KEYS[2], ARGV[1])
return 1
