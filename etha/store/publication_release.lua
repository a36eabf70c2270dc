-- What becomes of a hop. KEYS: publication. req.act:
-- renew: its lease. Answers whether the claim was there.
-- release: it has ended. Answers whether the claim was there; a hop that has committed counts anyway.
-- forget: a holder's buffers are gone.
lapse()
if req.act == 'renew' then
  local claim_number = int(req.number)
  local there = redis.call('HEXISTS', part('claims'), claim_number) == 1
  if there then redis.call('ZADD', part('leases'), now + req.claim_lease, claim_number) end
  match()
  finish()
  return ok(there)
end

if req.act == 'forget' then
  local h = holder(req.holder)
  if h then
    for _, s in ipairs(h.slots) do if s.seq > 0 then clear(req.holder, s) end end
    if h.orphan and h.used == 0 then drop(req.holder) else index(req.holder) end
    local S, said = hash(side_key(h.side)), req.text ~= ''
    if said then -- its own tensors hold what it has made of the version
      if number(S.serial) == h.serial then redis.call('HSET', side_key(h.side), 'error', req.text) end
    else
      if number(S.serial) == h.serial then redis.call('HSET', side_key(h.side), 'held', '0', 'version', '') end
      redis.call('ZREM', part('held'), req.holder)
    end
    event('holder_lost', 'publication', req.publication, 'holder', req.holder, 'text',
      said and req.text or 'its buffers hold no version any more')
  end
  match()
  finish()
  return ok(h ~= nil)
end

local claim = end_claim(int(req.number), req.committed)
local S = current_side(req.subscriber, req.serial)
local id = req.subscriber .. '/' .. int(req.serial)
if req.committed then -- also if it has left before Redis hears of this
  note_received(req.subscriber, req.seq)
  if (P.publisher or '') ~= '' then wake(P.publisher, 'held') end
end
-- A later question of the same subscriber is about a buffer that has been written since. A Redis that has lost its data
-- knows of no question.
if S and number(S.call) <= req.call then
  local own = holder(id)
  local function hold(held, from)
    redis.call('HSET', side_key(req.subscriber), 'held', int(held.seq), 'version', held.version)
    note_held(id, req.subscriber, held.seq)
    if own then
      local s = own.slots[1]
      if s.seq > 0 then clear(id, s) end
      local passed = s.arrival and s.arrival.seq == held.seq and s.children or {}
      s.seq, s.version, s.description, s.children, s.from, s.arrival = held.seq, held.version, held.description, passed, from, nil
      -- Whoever gave it counts this copy, also if the claim had lapsed.
      local source = from and holder(from)
      for _, given in ipairs(source and source.slots or {}) do
        if given.seq == held.seq and not contains(given.children, id) then
          given.children[#given.children + 1] = id
          index(from)
        end
      end
      index(id)
    end
  end
  if req.committed then
    hold(req, req.source)
    if req.seq > number(P.seq) then P.seq, P.version = req.seq, req.version end
    redis.call('HSET', side_key(req.subscriber), 'error', '', 'protect', '0', 'source', req.source, 'seconds',
      string.format('%.6f', req.seconds))
  elseif number(S.over) < req.call or claim then
    redis.call('HSET', side_key(req.subscriber), 'error', req.error)
    if req.overwritten then redis.call('HSET', side_key(req.subscriber), 'protect', '1') end
    if req.held[1] then
      hold(req.held[1], nil)
    else
      redis.call('HSET', side_key(req.subscriber), 'held', '0', 'version', '')
      redis.call('ZREM', part('held'), id)
      if own and own.slots[1].seq > 0 then -- Redis had lost that the hop overwrites it
        clear(id, own.slots[1])
        index(id)
      end
    end
    event('hop_failed', 'publication', req.publication, 'subscriber', req.subscriber, 'source', req.source, 'seq',
      int(req.seq), 'text', req.error)
  end
  redis.call('HSET', side_key(req.subscriber), 'call', int(req.call), 'over', int(req.call))
  keep(side_key(req.subscriber))
  wake(req.subscriber, 'released')
end
match()
finish()
return ok(claim ~= nil)
