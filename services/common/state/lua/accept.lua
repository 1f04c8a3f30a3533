-- Accepts one operation of a model: dedupes, journals, creates its future.
-- USES held
-- KEYS future, journal, order, pending, meta, lease, waiting of all owners, held, expiring
-- ARGV seq, payload, digest, owner, refusal ('' = not refused), base model ('' unless a creation),
--      result of a seq_id that was used before, result ttl (s), model id, request id,
--      work channel, done channel, max pending bytes, max journal bytes, max entries, max ahead,
--      '1' = it was accepted before, and Redis may have lost that,
--      gateway whose dispatcher is told otherwise ('' = none),
--      '1' = it is a batch, which a replay may need until the next step,
--      max bytes that all owners hold, max bytes that this one holds, max operations of this one that wait
-- Returns 'new' journaled and to be run, 'resolved' nothing is to be run, 'same' accepted before, or why not:
--      'conflict', 'ahead', 'full', 'batches', 'busy', 'many', 'waiting', 'held'. What is refused uses up its seq_id
--      also where there is no room to keep why ('held'): it is kept when the request is sent again
local seq = tonumber(ARGV[1])
local payload, digest, owner, refusal = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local ttl, most, again, batch = tonumber(ARGV[8]), tonumber(ARGV[15]), ARGV[17] == '1', ARGV[19] == '1'
-- So many operations of a model that are no batches get in after each batch however much its owner holds: they make
-- room. (Their results take some; without batches they would make none.)
local SMALL_BYTES, SMALL_AT_MOST = 4096, 64

local known = redis.call('HMGET', KEYS[1], 'state', 'digest')
if known[1] then
  if known[2] == digest or known[2] == '' then return 'same' end
  return 'conflict'
end

-- Whether there is room for so many bytes. What was accepted before had it.
local function fits(bytes)
  return again or has_room(owner, bytes, tonumber(ARGV[20]), tonumber(ARGV[21]))
end

-- Resolves the future with a failure, if there is room for it; whether there is.
local function fail(with, result)
  if not fits(#result + ENTRY) then return false end
  redis.call('HSET', KEYS[1], 'digest', with, 'owner', owner)
  resolve(KEYS[1], owner, result, ttl)
  redis.call('PUBLISH', ARGV[12], ARGV[10])
  return true
end

local meta = redis.call('HMGET', KEYS[5], 'durable', 'floor', 'closed', 'pending_bytes', 'journal_bytes', 'through',
  'beyond')
local floor = tonumber(meta[2] or -1)
-- Everything up to here was accepted, or is settled without.
local through = math.max(tonumber(meta[1] or -1), floor, tonumber(meta[6] or -1))
-- What is accepted anew may be part of a durable snapshot already: the trainer has its result.
if seq <= (again and floor or through) or redis.call('HEXISTS', KEYS[2], ARGV[1]) == 1 then
  -- What was refused where there was no room is sent again, to hear why; of a model that was refused its record tells.
  return fail('', refusal ~= '' and refusal or seq == 0 and meta[3] or ARGV[7]) and 'same' or 'held'
end

if meta[3] then
  -- The model is closed for ever: nothing has to be remembered but the result.
  return fail(digest, meta[3]) and 'resolved' or 'held'
end

local top = redis.call('ZREVRANGE', KEYS[3], 0, 0)[1]
if seq > math.max(through, tonumber(top or -1)) + tonumber(ARGV[16]) then return 'ahead' end

local outcome = 'new'
if refusal ~= '' then
  if seq == 0 then redis.call('HSET', KEYS[5], 'closed', refusal) end
  -- Nothing will run: the future is resolved at once and the seq_id stays behind as used up.
  outcome = fail(digest, refusal) and 'resolved' or 'held'
  redis.call('HSET', KEYS[2], ARGV[1], '')
else
  local size, waiting = #payload, redis.call('ZCARD', KEYS[4])
  local lowest = redis.call('ZRANGE', KEYS[4], 0, 0)[1]
  -- What the waiting ones wait for themselves gets in, or they would wait for ever.
  local awaited = lowest and seq == through + 1 and seq < tonumber(lowest)
  if lowest and not awaited then
    -- They drain by themselves; batches that a replay needs go with a step, which has to get in for that.
    if tonumber(meta[4] or 0) + size > tonumber(ARGV[13]) then return 'busy' end
    if waiting >= most then return 'many' end
  end
  if not (awaited or again) and tonumber(redis.call('HGET', KEYS[7], owner) or 0) >= tonumber(ARGV[22]) then
    return 'waiting'
  end
  if batch and redis.call('ZCARD', KEYS[3]) >= most then return 'batches' end
  if batch and tonumber(meta[5] or 0) + size > tonumber(ARGV[14]) then return 'full' end
  if not fits(size + ENTRY) then
    local beyond = tonumber(meta[7] or 0)
    if seq == 0 or batch or size > SMALL_BYTES or beyond >= SMALL_AT_MOST then return 'held' end
    redis.call('HSET', KEYS[5], 'beyond', beyond + 1)
  elseif batch then
    redis.call('HDEL', KEYS[5], 'beyond')
  end
  hold(owner, size + ENTRY)
  redis.call('HINCRBY', KEYS[7], owner, 1)
  redis.call('HSET', KEYS[1], 'state', 'pending', 'digest', digest, 'owner', owner)
  redis.call('HSET', KEYS[2], ARGV[1], payload)
  redis.call('ZADD', KEYS[4], seq, ARGV[1])
  redis.call('HINCRBY', KEYS[5], 'pending_bytes', size)
  local kept = redis.call('HINCRBY', KEYS[5], 'journal_bytes', size)
  count_part('*journals', size)
  -- The trainer, which does not know the bounds, makes haste with the next durable snapshot.
  if 2 * kept >= tonumber(ARGV[14]) or 2 * redis.call('ZCARD', KEYS[3]) >= most then
    redis.call('HSET', KEYS[5], 'half_full', '1')
  end
  redis.call('HSET', KEYS[5], 'owner', owner)
  if ARGV[6] ~= '' then redis.call('HSET', KEYS[5], 'base_model', ARGV[6]) end
end
redis.call('ZADD', KEYS[3], seq, ARGV[1])

-- Used up seq_ids need no entry once everything before them was accepted.
local reached = through
while redis.call('ZSCORE', KEYS[3], string.format('%.0f', reached + 1)) do
  reached = reached + 1
  local name = string.format('%.0f', reached)
  if redis.call('HSTRLEN', KEYS[2], name) == 0 then
    redis.call('HDEL', KEYS[2], name)
    redis.call('ZREM', KEYS[3], name)
  end
end
if reached > through then redis.call('HSET', KEYS[5], 'through', string.format('%.0f', reached)) end

-- Without a lease holder the accepting gateway itself is about to become one.
local holder = redis.call('GET', KEYS[6])
if holder and (ARGV[18] == '' or string.sub(holder, 1, #ARGV[18] + 1) ~= ARGV[18] .. '/') then
  redis.call('PUBLISH', ARGV[11], ARGV[9])
end
return outcome
