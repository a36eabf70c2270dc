-- One rank leaves a pair. KEYS: pair, own side. Only if the entry is still that member's.
local pair_key, own_key = KEYS[1], KEYS[2]
local rank, me = string.format('%d', req.rank), req.member
local m = object(redis.call('HGET', own_key, rank))
if not m or m.agent ~= me.agent or m.host ~= me.host or m.pid ~= me.pid or m.start ~= me.start then return ok(false) end
redis.call('HDEL', own_key, rank)
local state, epoch = redis.call('HGET', pair_key, 'state'), redis.call('HGET', pair_key, 'epoch')
local text = req.side .. ' rank ' .. rank .. ' (pid ' .. string.format('%d', me.pid) .. ' on ' .. ((me.name or '') ~= '' and me.name or me.host) .. ') '
  .. (req.reason == 'died' and 'died' or 'has closed its client')
event('left', 'pair', req.pair, 'side', req.side, 'rank', rank, 'reason', req.reason)
if state == 'formed' then
  redis.call('HSET', pair_key, 'state', 'lost', 'reason', req.reason, 'error', text, 'culprits', '[]')
  event('lost', 'pair', req.pair, 'epoch', epoch, 'reason', req.reason, 'text', text)
  state = 'lost'
end
-- The last one of a pair that was left in order: nothing is lost, and nobody is to come again.
if state == 'lost' and redis.call('HGET', pair_key, 'reason') == 'closed' then
  local left = 0
  for _, name in ipairs(object(redis.call('HGET', pair_key, 'sides')) or {}) do
    left = left + redis.call('EXISTS', pair_key .. ':' .. name)
  end
  if left == 0 then
    state = 'closed'
    redis.call('HSET', pair_key, 'state', state, 'error', '')
  end
end
keep(pair_key)
changed(pair_key, state or 'forming')
return ok(true)
