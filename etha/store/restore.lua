-- After data loss an agent puts back a membership of a formed (or since lost) pair. KEYS: pair, own side, remote side.
-- Never goes back: what is newer in Redis stays. Answers whether the member stands in the side now.
local pair_key, own_key, far_key = KEYS[1], KEYS[2], KEYS[3]
local rank, known = string.format('%d', req.rank), req.known
local P = hash(pair_key)
local epoch, state = number(P.epoch), P.state

if not state or epoch < known.epoch then
  -- Redis is older than what we know. Who joined it meanwhile waits for the epoch after ours.
  local waiting = {}
  for _, key in ipairs({own_key, far_key}) do
    for field, text in pairs(hash(key)) do
      local m = object(text)
      if m and tonumber(m.epoch) and m.epoch > epoch then
        m.epoch = known.epoch + 1
        redis.call('HSET', key, field, json(m))
        waiting[key], waiting.any = true, true
      else
        redis.call('HDEL', key, field)
      end
    end
  end
  local worlds, launches = object(P.world_sizes) or {}, object(P.launches) or {}
  for name, world in pairs(known.world_sizes) do
    if not waiting[pair_key .. ':' .. name] then worlds[name], launches[name] = world, known.launches[name] end
  end
  state = known.state
  local reason, why = known.reason, known.error
  if waiting.any and state == 'formed' then
    state, reason, why = 'lost', 'relaunched', 'others joined while Redis had forgotten the pair'
  end
  redis.call('HSET', pair_key, 'state', state, 'epoch', string.format('%d', known.epoch), 'sides', json(known.sides),
    'world_sizes', object_text(worlds), 'launches', object_text(launches),
    'formed_launches', object_text(known.launches), 'reason', reason, 'error', why)
  -- Launches told by occupancy are counted on, so that no id returns.
  local autos = object(P.autos) or {}
  for name, launch in pairs(known.launches) do
    local n = tonumber(string.match(launch, '^auto%-(%d+)$') or '')
    if n and n > (autos[name] or 0) then autos[name] = n end
  end
  redis.call('HSET', pair_key, 'autos', object_text(autos))
  redis.call('SADD', PREFIX .. 'pairs', req.pair)
  event('restored', 'pair', req.pair, 'epoch', known.epoch)
  epoch = known.epoch
elseif epoch == known.epoch and state == 'formed' and known.state ~= 'formed' then
  state = 'lost'
  redis.call('HSET', pair_key, 'state', state, 'reason', known.reason, 'error', known.error)
end

local launches, here = object(redis.call('HGET', pair_key, 'launches')) or {}, false
if epoch == known.epoch and launches[req.side] == req.member.launch then
  local m = object(redis.call('HGET', own_key, rank))
  if not m or (tonumber(m.epoch) or 0) < epoch then
    redis.call('HSET', own_key, rank, json(req.member))
    m = req.member
  end
  here = m.pid == req.member.pid and m.start == req.member.start and m.agent == req.member.agent
end
keep(PREFIX .. 'pairs')
keep(pair_key)
keep(own_key)
changed(pair_key, state)
return ok(here)
