-- Lets results go that their client has.
-- KEYS futures
-- ARGV seconds that they may still be asked for
for _, key in ipairs(KEYS) do
  if redis.call('HGET', key, 'state') == 'done' then redis.call('EXPIRE', key, ARGV[1]) end
end
return #KEYS
