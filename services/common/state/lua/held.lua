-- What owners hold in Redis: bytes of requests until nothing needs them, and of results until they expire.
-- The last two KEYS of a script that uses this are
--   held: hash owner -> bytes, '*' -> bytes of all, '<second>/<owner>' -> bytes of results that expire by then,
--     '*results' -> bytes of all those, '*journals' -> bytes of all journals
--   expiring: sorted set of those '<second>/<owner>', by second
local HELD, EXPIRING = KEYS[#KEYS - 1], KEYS[#KEYS]
local NOW = tonumber(redis.call('TIME')[1])
-- What a future costs beside its request or result, its place in lists included.
local ENTRY = 512
-- Results that expire within the same ten minutes are counted together, until all of them have.
local SLOT = 600

local function add(owner, bytes)
  if bytes == 0 then return end
  local text = string.format('%.0f', bytes)
  if redis.call('HINCRBY', HELD, owner, text) == 0 then redis.call('HDEL', HELD, owner) end
  redis.call('HINCRBY', HELD, '*', text)
end

-- Counts a part of what all hold, '*results' or '*journals', beside what `add` counts.
local function count_part(part, bytes)
  if redis.call('HINCRBY', HELD, part, string.format('%.0f', bytes)) == 0 then redis.call('HDEL', HELD, part) end
end

-- Takes off what has expired since: a little each time, which keeps up, as each result is counted once.
local function drop_expired()
  for _, slot in ipairs(redis.call('ZRANGEBYSCORE', EXPIRING, '-inf', NOW, 'LIMIT', 0, 16)) do
    local bytes = tonumber(redis.call('HGET', HELD, slot) or 0)
    add(string.match(slot, '/(.*)'), -bytes)
    count_part('*results', -bytes)
    redis.call('HDEL', HELD, slot)
    redis.call('ZREM', EXPIRING, slot)
  end
end

-- Counts bytes, less than 0 for what goes.
local function hold(owner, bytes)
  drop_expired()
  add(owner, bytes)
end

local function count_slot(slot, at, bytes)
  count_part('*results', bytes)
  if redis.call('HINCRBY', HELD, slot, string.format('%.0f', bytes)) == 0 then
    redis.call('HDEL', HELD, slot)
    redis.call('ZREM', EXPIRING, slot)
  else
    redis.call('ZADD', EXPIRING, at, slot)
  end
end

-- Has bytes that are counted go by themselves after some seconds; the second by which they are gone.
local function hold_for(owner, bytes, seconds)
  local at = string.format('%.0f', math.ceil((NOW + seconds) / SLOT) * SLOT)
  count_slot(at .. '/' .. owner, at, bytes)
  return at
end

-- Resolves a future. Its result is never refused: there was room for its request.
local function resolve(future, owner, result, seconds)
  local bytes = #result + ENTRY
  hold(owner, bytes)
  redis.call('HSET', future, 'state', 'done', 'result', result, 'counted', hold_for(owner, bytes, seconds))
  redis.call('EXPIRE', future, seconds)
end

-- Whether an owner may hold more: never more than is then left for others, so that there always is some.
local function has_room(owner, bytes, most, most_of_one)
  drop_expired()
  local mine = tonumber(redis.call('HGET', HELD, owner) or 0)
  local free = most - tonumber(redis.call('HGET', HELD, '*') or 0)
  return mine + bytes <= math.min(most_of_one, free - bytes)
end
