-- What the publisher does. KEYS: publication. req.act:
-- prepare: which slot a rank may write. Answers {slot, seq, ready, behind, readers, wait (ms)}.
-- abandon: the only rank has given a put up before it wrote anything. Its slot holds what it held.
-- announce: a rank has set its part aside. Answers the seq once all have, 0 before.
-- hold: an agent says what the buffers of a side hold and how many puts are over, after Redis has lost it.
local S, refused = current_side(req.side, req.serial)
if not S then return refused end
local id = req.side .. '/' .. S.serial
local h = holder(id)
local where = 'publication ' .. req.publication .. ', ' .. S.role .. ' ' .. req.side

local function set(slot, seq, version, description)
  slot.seq, slot.version, slot.description, slot.children, slot.from = seq, version, description, {}, nil
end

if req.act == 'hold' then
  local given, newest = {}, 0
  for _, held in ipairs(req.held) do given[held.slot + 1], newest = held, math.max(newest, held.seq) end
  for i, s in ipairs(h and h.slots or {}) do
    local held = given[i]
    if held and s.seq < held.seq then
      set(s, held.seq, held.version, held.description)
    elseif not held and s.seq > 0 and (S.role == 'subscriber' or s.seq < newest) then
      clear(id, s) -- an older copy of the data says so
    end
  end
  for _, held in ipairs(req.held) do
    if held.seq > number(P.seq) then P.seq, P.version = held.seq, held.version end
    if S.role == 'subscriber' and held.seq > number(S.held) then
      S.held = held.seq
      redis.call('HSET', side_key(req.side), 'held', int(held.seq), 'version', held.version)
      note_held(id, req.side, held.seq)
    end
  end
  -- What was announced is over, also if an older copy of the data says that ranks are missing.
  if S.role == 'publisher' and req.puts > number(S.puts) then
    redis.call('HSET', side_key(req.side), 'puts', int(req.puts), 'announced', int(math.max(newest, number(S.announced))))
    local put = S.put ~= '' and object(S.put)
    if put and put.put <= req.puts then redis.call('HSET', side_key(req.side), 'put', '') end
  end
  if h then
    index(id)
  elseif #req.held > 0 and select(2, ranks_of(S, side_key(req.side))) < number(S.world) then
    redis.call('HSET', side_key(req.side), 'pending', json(req.held)) -- it is a holder once all ranks are back
  end
  match()
  finish()
  return ok(true)
end

if S.role ~= 'publisher' then return refuse('config', where .. ' does not publish') end
local ranks, count = ranks_of(S, side_key(req.side))
local gone = req.act == 'prepare' and end_if_silent(req.side, S, ranks)
if gone then return gone end
if count < number(S.world) then
  -- Redis has lost them, and their agents put them back. Then the side's key is woken, and this rank asks again.
  if req.act == 'announce' then return ok(0) end
  return ok({slot = 0, seq = 0, ready = false, behind = true, readers = {}, wait = 0})
end
-- It was dropped while its agent did not answer. What its slots hold is put back by that agent.
h = h or add_holder(req.side, S, ranks)
local put = S.put ~= '' and object(S.put) or nil
local function save() redis.call('HSET', side_key(req.side), 'put', put and json(put) or '') end

if req.act == 'abandon' then
  lapse()
  if put and put.put == req.put and number(S.world) == 1 then
    put_back(id, put)
    put = nil
    save()
  end
  match()
  finish()
  return ok(true)
end

if req.act == 'prepare' then
  lapse()
  if put and put.put < req.put and number(S.world) == 1 then
    -- The only rank gave that put up before it was announced, so nobody waits for it: its slot and seq go over.
    put.put, put.labels = req.put, {}
    save()
  end
  if put and put.put ~= req.put then
    finish()
    return ok({slot = 0, seq = 0, ready = false, behind = true, readers = {}, wait = 0})
  end
  if not put then
    if req.put <= number(S.puts) then return refuse('protocol', where .. ': put ' .. int(req.put) .. ' is over') end
    -- The oldest slot of those that nobody reads. So the newest version is overwritten only if all others are read.
    local best
    for i, s in ipairs(h.slots) do
      local b = best and h.slots[best]
      if not b or (s.used == 0 and b.used > 0) or ((s.used == 0) == (b.used == 0) and s.seq < b.seq) then best = i end
    end
    put = {put = req.put, seq = number(P.seq) + 1, slot = best - 1, labels = {}}
    local s = h.slots[best]
    if s.seq > 0 then
      put.kept = {seq = s.seq, version = s.version, description = s.description}
      clear(id, s)
    end
    index(id)
    save()
  end
  local s, readers = h.slots[put.slot + 1], {}
  if s.used == 0 and not put.given then
    put.given = true
    save()
  end
  if s.used > 0 then
    local flat = redis.call('HGETALL', part('claims'))
    for i = 1, #flat, 2 do
      local claim = object(flat[i + 1])
      if claim and claim.source == req.side and claim.source_serial == h.serial and claim.slot == put.slot then
        readers[#readers + 1] = {claim = claim.number, subscriber = claim.subscriber, protected = claim.protected}
      end
    end
  end
  match()
  finish()
  return ok({slot = put.slot, seq = put.seq, ready = s.used == 0, behind = false, readers = readers,
    wait = s.used > 0 and first_lapse() or 0})
end

-- announce
local rank = int(req.rank)
local s = h.slots[req.slot + 1]
if req.put <= number(S.puts) then return ok(number(S.announced)) end
if s and s.seq == req.seq and not put then
  -- Redis had lost that this version was announced, and its agents have put it back.
  redis.call('HSET', side_key(req.side), 'puts', int(req.put), 'announced', int(req.seq))
  return ok(req.seq)
end
put = put or {put = req.put, seq = req.seq, slot = req.slot, labels = {}}
if put.put ~= req.put or put.slot ~= req.slot then
  return refuse('protocol', where .. ': rank ' .. rank .. ' announces put ' .. int(req.put) .. ', and put ' .. int(put.put)
    .. ' runs')
end
for other, given in pairs(put.labels) do
  if given ~= req.version then
    return refuse('config', where .. ': rank ' .. rank .. ' puts version ' .. (req.version ~= '' and req.version or 'None')
      .. ', rank ' .. other .. ' ' .. (given ~= '' and given or 'None') .. ': give the same on all ranks')
  end
end
put.labels[rank] = req.version
local come = 0
for _ in pairs(put.labels) do come = come + 1 end
if come < number(S.world) then
  save()
  finish()
  return ok(0)
end
local seq = math.max(put.seq, number(P.seq) + 1)
P.seq, P.version = seq, req.version ~= '' and req.version or int(seq)
set(s, seq, P.version, S.digest)
put = nil
save()
redis.call('HSET', side_key(req.side), 'puts', int(req.put), 'announced', int(seq), 'held', int(seq), 'version', P.version)
redis.call('HSET', part('versions'), int(seq), json({version = P.version, at = now}))
redis.call('HDEL', part('versions'), int(seq - req.max_versions))
redis.call('ZREMRANGEBYSCORE', part('received'), '-inf', int(seq - req.max_versions))
index(id)
event('published', 'publication', req.publication, 'seq', int(seq), 'version', P.version)
wake(req.side, 'announced')
changed(key, int(seq))
keep(side_key(req.side))
lapse()
match()
finish()
return ok(seq)
