-- A subscriber asks for a version, or takes its question back. KEYS: publication. req.act: claim, withdraw.
-- Answers ok = {claim (if it has one), over, last, wait (ms), seq, held, unfit}, or ok = {differs} if the ranks ask for
-- different versions in the same call.
local subscriber = req.subscriber
local S, refused = current_side(subscriber, req.serial)
if not S then
  if req.act == 'withdraw' then return ok(false) end
  return refused
end
local id = subscriber .. '/' .. int(req.serial)
local last, over = number(S.call), number(S.over)
local where = 'publication ' .. req.publication .. ', subscriber ' .. subscriber

if req.act == 'withdraw' then
  if req.call < last or req.call <= over then return ok(false) end
  leave_queue(id)
  if number(S.claim) > 0 then end_claim(S.claim, false) end
  redis.call('HSET', side_key(subscriber), 'call', int(req.call), 'over', int(req.call), 'unfit', '')
  wake(subscriber, 'withdrawn')
  lapse()
  match()
  finish()
  return ok(true)
end

local function answer()
  S = hash(side_key(subscriber))
  local text = number(S.claim) > 0 and redis.call('HGET', part('claims'), S.claim) or nil
  local claim = text and object(text) or nil
  local waits = not claim and (req.version ~= '' or number(P.seq) > req.newer_than)
  return ok({claim = claim, over = req.call < number(S.call) or req.call <= number(S.over), last = number(S.call),
    wait = waits and first_lapse() or 0, seq = number(P.seq), held = number(S.held), unfit = S.unfit or ''})
end

-- The version and the seq of the side's last question.
local function last_asked() return string.match(S.asked or '', '^(.*) (%d+)$') end

-- A question that pins no version is refused only because the tensors do not fit.
local function refused_answer(text) return refuse(req.version ~= '' and 'config' or 'unfit', where .. ': ' .. text) end
-- Another question of the same call is not refused with it: its call is over.
if number(S.refused) == req.call and last_asked() == req.version then return refused_answer(S.error) end
local ranks, count = ranks_of(S, side_key(subscriber))
local gone = end_if_silent(subscriber, S, ranks)
if gone then return gone end
if req.call < last or req.call <= over or count < number(S.world) then return answer() end

local asked = req.version .. ' ' .. int(req.newer_than)
if req.call == last then
  local version, newer_than = last_asked()
  if version ~= req.version then
    local function name(label) return label ~= '' and 'version ' .. label or 'the newest version' end
    return ok({differs = where .. ': ranks ask for different versions in the same call, ' .. name(req.version) .. ' and '
      .. name(version) .. ': give the same on all ranks'})
  end
  if req.newer_than < tonumber(newer_than) then
    -- After a hop that was aborted some ranks hold their version and some do not: the lowest counts.
    redis.call('HSET', side_key(subscriber), 'asked', asked)
    local text = redis.call('HGET', part('asks'), id)
    local ask = text and object(text)
    if ask then
      ask.newer_than = req.newer_than
      redis.call('HSET', part('asks'), id, json(ask))
      if req.version == '' then redis.call('ZADD', part('wanted'), req.newer_than, id) end
    end
  end
else
  if req.version ~= '' then
    -- A version that nobody has does not come back.
    local text = pinned(id, {version = req.version, digest = S.digest})
    if text then return refuse('config', where .. ': ' .. text) end
  end
  leave_queue(id)
  if number(S.claim) > 0 then end_claim(S.claim, false) end
  order = order + 1
  local hosts, known = {}, {}
  for rank = 0, number(S.world) - 1 do
    local name = ranks[rank].host
    if not known[name] then known[name], hosts[#hosts + 1] = true, name end
  end
  local ask = {subscriber = subscriber, serial = req.serial, call = req.call, newer_than = req.newer_than,
    version = req.version, links = req.links, avoid = req.avoid, digest = S.digest, zone = S.zone or '', hosts = hosts,
    protected = S.protect == '1'}
  redis.call('HSET', part('asks'), id, json(ask))
  redis.call('ZADD', part('queue'), order, id)
  if #req.avoid > 0 then avoiding[#avoiding + 1] = id end
  redis.call('ZADD', part('wanted'), req.version ~= '' and 0 or req.newer_than, id)
  redis.call('HSET', side_key(subscriber), 'call', int(req.call), 'asked', asked)
end
lapse()
match()
-- Without a free place nobody was asked above whether it could feed this one.
local waiting = redis.call('HGET', part('asks'), id)
if waiting then tell_unfit(id, object(waiting)) end
keep(side_key(subscriber))
finish()
local refused_text = redis.call('HMGET', side_key(subscriber), 'refused', 'error')
if number(refused_text[1]) == req.call then return refused_answer(refused_text[2]) end
return answer()
