-- Counts what an owner used of the cluster, in the step that writes the result which it came to: a result that is
-- there already, or comes under an old epoch, is not written and not counted.
-- A day of an owner is a hash, "<kind>\n<base model>\n<session>\n<run>" -> amount, which ends by itself.
local MOST_FIELDS = 200

-- The arguments from `first` on are pairs of a kind and an amount; of more runs than MOST_FIELDS tell apart the rest
-- is counted together.
local function count_use(day, seconds, base_model, session, run, first)
  for i = first, #ARGV, 2 do
    local field = ARGV[i] .. '\n' .. base_model .. '\n' .. session .. '\n' .. run
    if redis.call('HEXISTS', day, field) == 0 and redis.call('HLEN', day) >= MOST_FIELDS then
      field = ARGV[i] .. '\n' .. base_model .. '\n\n'
    end
    redis.call('HINCRBY', day, field, ARGV[i + 1])
  end
  if ARGV[first] then redis.call('EXPIRE', day, seconds) end
end
