-- One rank takes its registration back, or has closed the batch. KEYS: batch, roster of the generation.
-- Answers true when it was taken back before everybody had come: nobody will count on this rank.
local key, list, who = KEYS[1], KEYS[2], req.side .. '/' .. string.format('%d', req.rank)
local current = number(redis.call('HGET', key, 'generation')) == req.generation
local state = redis.call('HGET', key, 'state')
if redis.call('HEXISTS', list, who) == 0 then return ok(current and state == 'registering') end
if current and state == 'registering' then
  redis.call('HDEL', list, who, 'token:' .. who)
  redis.call('HINCRBY', list, 'entries', -1)
  event('withdrawn', 'pair', req.pair, 'batch', req.batch, 'side', req.side, 'rank', req.rank)
  changed(key, state)
  return ok(true)
end
if redis.call('HSETNX', list, 'closed:' .. who, '1') == 1 then
  local closed = redis.call('HINCRBY', list, 'closed', 1)
  if current and closed >= number(redis.call('HGET', list, 'entries')) then
    redis.call('HSET', key, 'state', 'closed')
    redis.call('PEXPIRE', key, req.closed)
    event('closed', 'pair', req.pair, 'batch', req.batch)
    changed(key, 'closed')
  end
end
return ok(false)
