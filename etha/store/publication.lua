-- Stands in front of claim.lua and publication_*.lua. KEYS[1] is the publication; its other keys are KEYS[1]:PART.
-- The rule is that of etha/agent/protocol/sources.py; a test plays both against each other. A script loads what it needs,
-- changes it here, and writes it back in finish(). Holders are named SIDE/SERIAL. Slots count from 0 outside and from 1 in
-- lists.
local key = KEYS[1]
local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000)
local P = hash(key)
local serial, order = number(P.serial), number(P.order)
local retired, orphans = object(P.retired), object(P.orphans)
local draining, avoiding = object(P.draining), object(P.avoiding)
if not (retired and orphans and draining and avoiding) then
  return refuse('protocol', "Redis key '" .. key .. "' does not hold JSON where it should")
end
local PARTS = {'sides', 'holders', 'free', 'offers', 'held', 'received', 'queue', 'wanted', 'asks', 'claims', 'leases', 'versions', 'feeds', 'sets'}
local function part(name) return key .. ':' .. name end
local function side_key(side) return key .. ':side:' .. side end
local function table_key(digest) return key .. ':table:' .. digest end
local function int(value) return string.format('%d', value) end
local function list_text(value) if #value == 0 then return '[]' end return json(value) end
local function wake(side, what) changed(side_key(side), what) end
-- Launches and claims are numbered by the clock, so that a Redis that has lost its data gives no number again.
local function next_serial()
  serial = math.max(serial + 1, now)
  return serial
end
local function remove(list, value)
  for i = #list, 1, -1 do if list[i] == value then table.remove(list, i) end end
end
local function contains(list, value)
  for _, one in ipairs(list) do if one == value then return true end end
  return false
end

local leases = {}
local function served(agents)
  for _, agent in ipairs(agents) do
    if leases[agent] == nil then leases[agent] = redis.call('EXISTS', PREFIX .. 'agent:' .. agent) == 1 end
    if not leases[agent] then return false end
  end
  return true
end

-- ---- holders ------------------------------------------------------------------------------------
local holders, touched = {}, {}
local function holder(id)
  if holders[id] == nil then
    local text = redis.call('HGET', part('holders'), id)
    local h = text and object(text)
    if text and not (h and type(h.slots) == 'table' and type(h.agents) == 'table' and type(h.hosts) == 'table'
        and type(h.places) == 'number' and type(h.used) == 'number') then
      error("Redis key '" .. part('holders') .. "': field '" .. id .. "' is not a holder")
    end
    holders[id] = h or false
  end
  return holders[id] or nil
end

-- Most subscribers in a row each of which is still receiving what it passes on.
local MOST_DEEP = 16

-- What can be had from a slot: itself, or the version that its subscriber is receiving and passes on (s.arrival).
local function given_by(s)
  if s.arrival and s.arrival.depth < MOST_DEEP then return s.arrival end
  return s
end

-- At most slots - 1 are read at a time, so that a put always finds one. The answer says for each slot whether a new
-- claim may take it, and the greatest seq that is kept back for this reason.
local function claimable(h)
  local reading, found, back = 0, {}, 0
  for _, s in ipairs(h.slots) do if s.used > 0 then reading = reading + 1 end end
  local full = not h.orphan and reading >= math.max(1, #h.slots - 1)
  for i, s in ipairs(h.slots) do
    found[i] = given_by(s).seq > 0 and not (full and s.used == 0)
    if s.seq > 0 and not found[i] then back = math.max(back, s.seq) end
  end
  return found, back
end

-- Holders in the order in which they were touched, so that a script does the same everywhere.
local function touch(id)
  if not touched[id] then touched[id], touched[#touched + 1] = true, id end
end

-- The publisher has given enough copies of a version, and one of those who have them has its tensors, and so may feed
-- whomever the publisher may feed. Only whoever avoids that one may come here.
local function given(h, s)
  if not h.publisher or h.orphan or h.copies == 0 or #s.children < h.copies then return false end
  for _, id in ipairs(s.children) do
    local child = holder(id)
    if child and child.digest == h.digest then return true end
  end
  return false
end

-- The newest version that can be had at a holder now; without ``all`` only what anybody may have.
local function offer(h, all)
  local best = 0
  if h.used < h.places and not h.draining then
    local can = claimable(h)
    for i, s in ipairs(h.slots) do
      if can[i] and (all or not given(h, s)) then best = math.max(best, given_by(s).seq) end
    end
  end
  return best
end

-- Write a holder and its places in the indices.
local function index(id)
  local h = holders[id]
  touch(id)
  local best, has = 0, 0
  if h then
    for _, s in ipairs(h.slots) do has = math.max(has, given_by(s).seq) end
    best = offer(h)
  end
  if best > 0 then redis.call('ZADD', part('free'), best, id) else redis.call('ZREM', part('free'), id) end
  if has > 0 then redis.call('ZADD', part('offers'), has, id) else redis.call('ZREM', part('offers'), id) end
end

-- A subscriber has received a version whole: that counts for a put that waits, also after it has left.
local function note_received(side, seq)
  redis.call('ZADD', part('received'), 'GT', seq, side)
  local most = req.max_received
  if redis.call('ZCARD', part('received')) > most then redis.call('ZREMRANGEBYRANK', part('received'), 0, -most - 1) end
end

local function note_held(id, side, seq)
  redis.call('ZADD', part('held'), seq, id)
  note_received(side, seq)
end

local vanished = false

-- A version in a slot is forgotten. Whoever gave it counts this copy no more.
local function clear(id, slot)
  local from = slot.from and holder(slot.from)
  if from then
    for _, s in ipairs(from.slots) do
      if s.seq == slot.seq then remove(s.children, id) end
    end
    index(slot.from)
  end
  slot.seq, slot.version, slot.description, slot.children, slot.from = 0, '', '', {}, nil
  vanished = true
end

local function drop(id)
  local h = holder(id)
  if not h then return end
  for _, s in ipairs(h.slots) do if s.seq > 0 then clear(id, s) end end
  holders[id] = false
  remove(orphans, id)
  remove(draining, id)
  if P.holder == id then P.holder = '' end
  redis.call('HDEL', part('holders'), id)
  index(id)
  wake(h.side, 'dropped')
end

-- ---- what sides have of tensors -----------------------------------------------------------------
-- dtype, shape, covers, tied
local function tensor(text)
  return string.match(text, '^(%S+) (%S+) (%S+) ?(%S*)$')
end

-- How many indices two lists {start, stop, start, stop, ...} have in common.
local function shared(a, b)
  local i, j, total = 1, 1, 0
  while i < #a and j < #b do
    total = total + math.max(0, math.min(a[i + 1], b[j + 1]) - math.max(a[i], b[j]))
    if a[i + 1] < b[j + 1] then i = i + 2 else j = j + 2 end
  end
  return total
end

-- Whether a set of elements is in another one; as etha/plan/layouts/element_set.py, which has written both.
local function within(inner, outer)
  for _, group in ipairs(inner) do
    local indices, left = group[1], 0
    for i = 1, #indices, 2 do left = left + indices[i + 1] - indices[i] end
    for _, there in ipairs(outer) do
      if not group[2] or within(group[2], there[2]) then left = left - shared(indices, there[1]) end
    end
    if left > 0 then return false end
  end
  return true
end

-- Whether all elements of set ``inner`` are in ``outer``, by their digests; "*" is the whole tensor.
local included = {}
local function includes(outer, inner)
  if outer == '*' or outer == inner then return true end
  if inner == '*' then return false end
  local known = outer .. inner
  if included[known] == nil then
    local texts = redis.call('HMGET', part('sets'), outer, inner)
    local found, fine = false, true
    if texts[1] and texts[2] then -- one that is too long to be kept has an equal only
      fine, found = pcall(function() return within(cjson.decode(texts[2]), cjson.decode(texts[1])) end)
    end
    if not fine then
      error("Redis key '" .. part('sets') .. "': field '" .. outer .. "' or '" .. inner .. "' is not a set of elements")
    end
    included[known] = found
  end
  return included[known]
end

-- Whether a side of table ``source`` has all elements that one of table ``target`` has, at their dtypes.
local function has_all(source, target)
  if source == target then return true end
  local field = source .. '>=' .. target
  local known = redis.call('HGET', part('feeds'), field)
  if known then return known == '1' end
  local S, all = hash(table_key(source)), true
  for name, text in pairs(hash(table_key(target))) do
    local dtype, _, wanted = tensor(text)
    local has, _, there = tensor(S[name] or '- - -')
    all = all and has == dtype and includes(there, wanted)
  end
  redis.call('HSET', part('feeds'), field, all and '1' or '0')
  return all
end

-- A dead publisher's last version is kept until another holder has all of it or of a newer one.
local function drop_orphans()
  for i = #orphans, 1, -1 do
    local id = orphans[i]
    local h = holder(id)
    if not h then
      table.remove(orphans, i)
    elseif h.used == 0 then
      local seq = 0
      for _, s in ipairs(h.slots) do seq = math.max(seq, s.seq) end
      local held = seq == 0
      for _, other in ipairs(seq > 0 and redis.call('ZRANGEBYSCORE', part('offers'), seq, '+inf') or {}) do
        local one, whole = other ~= id and holder(other), 0
        for _, s in ipairs(one and one.slots or {}) do whole = math.max(whole, s.seq) end
        held = held or (one and whole >= seq and has_all(one.digest, h.digest))
      end
      if held then drop(id) end
    end
  end
end

-- ---- who may feed whom ------------------------------------------------------------------------------
-- '' if a holder of table ``source`` may feed a subscriber of table ``target`` a version of table ``description``:
-- each tensor has the publisher's dtype or the subscriber's own, all that is wanted is there, what is one memory here is
-- one memory there, because it has one content only, and the subscriber has all tensors. Otherwise why not.
local function feeds(source, target, description)
  local field = source .. '>' .. target .. '@' .. description
  local known = redis.call('HGET', part('feeds'), field)
  if known then return known end
  local S, T, D = hash(table_key(source)), hash(table_key(target)), hash(table_key(description))
  if next(S) == nil or next(T) == nil or next(D) == nil then return 'tensors are not known any more' end
  local names, why, ties = {}, '', {}
  for name in pairs(T) do names[#names + 1] = name end
  table.sort(names)
  for _, name in ipairs(names) do
    local dtype, shape, covers, tied = tensor(T[name])
    if not S[name] or not D[name] then
      why = 'tensor ' .. name .. ' is not among those that are published'
      break
    end
    local has, its, part_of, its_tied = tensor(S[name])
    local published = tensor(D[name])
    if its ~= shape then
      why = 'tensor ' .. name .. ' has global shape ' .. its .. ' there and ' .. shape .. ' here'
    elseif has ~= published and has ~= dtype then
      why = 'tensor ' .. name .. ' is ' .. has .. ' there, neither ' .. published .. ' as published nor ' .. dtype
    elseif not includes(part_of, covers) then
      why = 'tensor ' .. name .. ' lacks elements there that are wanted here'
    elseif tied ~= '' and (its_tied == '' or its_tied ~= (ties[tied] or its_tied)) then
      why = 'tensor ' .. name .. ' is one memory with another one here and not there: tie them on both sides, or register '
        .. 'one of them'
    end
    if tied ~= '' then ties[tied] = its_tied end
    if why ~= '' then break end
  end
  local others = {}
  for name in pairs(D) do if not T[name] then others[#others + 1] = name end end
  table.sort(others)
  if why == '' and others[1] then why = 'tensor ' .. others[1] .. ' is published, and not among those of the subscriber' end
  redis.call('HSET', part('feeds'), field, why)
  return why
end

local function fits(ask, id, h, s)
  local from = given_by(s)
  if from.seq == 0 or contains(ask.avoid, id) then return false end
  if s.arrival then -- nothing is passed on inside a host
    for _, name in ipairs(h.hosts) do if contains(ask.hosts, name) then return false end end
  end
  if ask.version ~= '' then
    if from.version ~= ask.version then return false end
  elseif from.seq <= ask.newer_than then return false end
  return feeds(h.digest, ask.digest, from.description) == ''
end

-- The publisher has given enough copies of a version if those who have them may feed this subscriber. One whose agent is
-- silent is found when it is chosen, or when its own claim lapses.
local function enough(ask, h, s)
  if not h.publisher or h.orphan or h.copies == 0 or #s.children < h.copies then return false end
  for _, id in ipairs(s.children) do
    local child = holder(id)
    if child and not contains(ask.avoid, id) and feeds(child.digest, ask.digest, s.description) == '' then return true end
  end
  return false
end

-- What counts between two holders of one version, in this order.
local function better(a, b)
  for i = 1, #a do if a[i] ~= b[i] then return a[i] > b[i] end end
  return false
end
local function preference(ask, id, h)
  local host, depth = 0, 0
  for _, name in ipairs(h.hosts) do if contains(ask.hosts, name) then host = 1 end end
  for _, s in ipairs(h.slots) do if s.arrival then depth = s.arrival.depth end end -- a subscriber has one slot
  return {depth == 0 and 1 or 0, contains(ask.links, id) and 1 or 0, host, (h.zone ~= '' and h.zone == ask.zone) and 1 or 0,
    h.publisher and 0 or 1, -h.used, -h.serial, -depth}
end

-- The newest version that a waiting subscriber can get now, and from whom. ``closed``: holders that others have to wait
-- for first.
local choose
function choose(own, ask, closed)
  local low = ask.version ~= '' and 0 or ask.newer_than
  local free = redis.call('ZREVRANGEBYSCORE', part('free'), '+inf', '(' .. int(low), 'WITHSCORES')
  local offers = {}
  for i = 1, #free, 2 do offers[#offers + 1] = {free[i], tonumber(free[i + 1])} end
  local publisher = #ask.avoid > 0 and (P.holder or '') ~= '' and holder(P.holder)
  if publisher and offer(publisher, true) > math.max(low, offer(publisher)) then
    for i = #offers, 1, -1 do if offers[i][1] == P.holder then table.remove(offers, i) end end
    offers[#offers + 1] = {P.holder, offer(publisher, true)}
    table.sort(offers, function(a, b) if a[2] ~= b[2] then return a[2] > b[2] end return a[1] > b[1] end)
  end
  local best, best_slot, best_seq, best_rank, dropped
  for _, one in ipairs(offers) do
    local id, score = one[1], one[2]
    if best and best_seq > score then break end
    local h = holder(id)
    if h and id ~= own and not closed[id] then
      if not served(h.agents) then
        event('holder_lost', 'publication', req.publication, 'holder', id, 'text', 'the agent of ' .. id .. ' does not answer')
        drop(id)
        dropped = true
      else
        local can, rank = claimable(h), nil
        for slot, s in ipairs(h.slots) do
          if can[slot] and fits(ask, id, h, s) and not enough(ask, h, s) then
            rank = rank or preference(ask, id, h)
            local seq = given_by(s).seq
            if not best or seq > best_seq or (seq == best_seq and better(rank, best_rank)) then
              best, best_slot, best_seq, best_rank = id, slot, seq, rank
            end
          end
        end
      end
    end
  end
  -- Without that holder the publisher may give another copy.
  if dropped and not best then return choose(own, ask, closed) end
  return best, best_slot
end

-- The labels of the versions that others hold, and whether one of them is what a pinned question can have.
local function pinned(own, ask)
  local there, found = {}, false
  local flat = redis.call('HKEYS', part('holders'))
  for _, id in ipairs(flat) do
    local h = holder(id)
    for _, s in ipairs(h and id ~= own and h.slots or {}) do
      if s.seq > 0 then
        there[s.version] = true
        found = found or (s.version == ask.version and feeds(h.digest, ask.digest, s.description) == '')
      end
    end
  end
  if found then return nil end
  local names = {}
  for label in pairs(there) do names[#names + 1] = label end
  table.sort(names)
  return 'no holder has version ' .. ask.version .. ' in a form that this subscriber can take; those that are held: '
    .. (#names > 0 and table.concat(names, ', ') or 'none')
end

-- Why no holder of a newer version can feed a subscriber that has not pinned one: what is wrong with one of the newest.
-- '' if one can, once it has a place, and if nobody has a newer version.
local function unfit(own, ask)
  local why = ''
  if ask.version ~= '' then return why end
  for _, id in ipairs(redis.call('ZREVRANGEBYSCORE', part('offers'), '+inf', '(' .. int(ask.newer_than))) do
    local h = id ~= own and holder(id)
    for _, s in ipairs(h and h.slots or {}) do
      if s.seq > ask.newer_than then
        local found = feeds(h.digest, ask.digest, s.description)
        if found == '' then return '' end
        if why == '' then why = 'no holder of a newer version can feed it: ' .. found end
      end
    end
  end
  return why
end

-- ---- claims ---------------------------------------------------------------------------------------------
-- A subscriber that was to receive next serves what it holds on.
local function serve_on(id)
  local h = holder(id)
  if h and h.draining then
    h.draining = nil
    remove(draining, id)
    index(id)
  end
end

local function leave_queue(id)
  redis.call('ZREM', part('queue'), id)
  redis.call('ZREM', part('wanted'), id)
  redis.call('HDEL', part('asks'), id)
  remove(avoiding, id)
  serve_on(id)
end

-- A question is taken out of the queue. The subscriber's ranks hear why.
local function refuse_ask(id, ask, text)
  leave_queue(id)
  redis.call('HSET', side_key(ask.subscriber), 'error', text, 'refused', int(ask.call), 'over', int(ask.call))
  wake(ask.subscriber, 'refused')
end

-- Tell a subscriber that waits why no holder can feed it. If not even what is published now fits, it waits in vain.
local function tell_unfit(id, ask)
  local why, at = unfit(id, ask), side_key(ask.subscriber)
  local published = why ~= '' and (P.description or '') ~= '' and feeds(P.description, ask.digest, P.description) or ''
  if published ~= '' then
    redis.call('HSET', at, 'unfit', '')
    refuse_ask(id, ask, published)
  elseif why ~= (redis.call('HGET', at, 'unfit') or '') then
    redis.call('HSET', at, 'unfit', why)
    wake(ask.subscriber, 'unfit')
  end
end

local function grant(id, ask, source, slot)
  local h = holder(source)
  local s, own = h.slots[slot], holder(id)
  local from = given_by(s)
  local claim = {number = next_serial(), call = ask.call, subscriber = ask.subscriber, serial = ask.serial,
    source = h.side, source_serial = h.serial, source_world = h.world, source_launch = h.launch, slot = slot - 1,
    seq = from.seq, version = from.version, description = from.description, protected = ask.protected,
    upstream = s.arrival and s.arrival.claim or 0, passed = own and own.passes or nil}
  redis.call('HSET', part('claims'), int(claim.number), json(claim))
  redis.call('ZADD', part('leases'), now + req.claim_lease, int(claim.number))
  h.used, s.used = h.used + 1, s.used + 1
  leave_queue(id)
  if own then
    -- The hop overwrites what the subscriber's own buffer holds.
    for _, one in ipairs(own.slots) do if one.seq > 0 then clear(id, one) end end
    s.children[#s.children + 1] = id
    if own.passes then
      own.slots[1].children = {}
      own.slots[1].arrival = {seq = from.seq, version = from.version, description = from.description,
        claim = claim.number, depth = (s.arrival and s.arrival.depth or 0) + 1}
    end
    index(id)
  end
  index(source)
  redis.call('HSET', side_key(ask.subscriber), 'claim', int(claim.number), 'source', source, 'unfit', '')
  wake(ask.subscriber, 'granted')
  wake(h.side, 'granted') -- its agents begin the hop
end

-- A version does not come: nobody is passed it on.
local end_claim
local function end_passed(claim)
  local id = claim.subscriber .. '/' .. int(claim.serial)
  local own = holder(id)
  local s = own and own.slots[1]
  if not claim.passed then return end
  if s and s.arrival and s.arrival.claim == claim.number then
    s.arrival, s.children = nil, {}
    index(id)
  end
  local flat, ended = redis.call('HVALS', part('claims')), {}
  for _, text in ipairs(flat) do
    local one = object(text)
    if one and one.upstream == claim.number then ended[#ended + 1] = one end
  end
  table.sort(ended, function(a, b) return a.number < b.number end)
  for _, one in ipairs(ended) do
    if end_claim(int(one.number), false) then
      local side = side_key(one.subscriber)
      if number(redis.call('HGET', side, 'serial')) == one.serial then
        redis.call('HSET', side, 'over', int(one.call), 'error', 'what ' .. one.source .. ' passed on did not come')
      end
    end
  end
end

-- A claim ends. Answers it, or nil if it is not there any more.
function end_claim(claim_number, committed)
  local text = redis.call('HGET', part('claims'), claim_number)
  if not text then return nil end
  local claim = object(text)
  if not claim or type(claim.source_serial) ~= 'number' then
    error("Redis key '" .. part('claims') .. "': field '" .. claim_number .. "' is not a claim")
  end
  redis.call('HDEL', part('claims'), claim_number)
  redis.call('ZREM', part('leases'), claim_number)
  local source = claim.source .. '/' .. int(claim.source_serial)
  local h = holder(source)
  local s = h and h.slots[claim.slot + 1]
  if s and s.used > 0 then
    h.used, s.used = h.used - 1, s.used - 1
    if not committed and (s.seq == claim.seq or (s.arrival and s.arrival.seq == claim.seq)) then remove(s.children, claim.subscriber .. '/' .. int(claim.serial)) end
    index(source)
  end
  wake(claim.source, 'ended')
  wake(claim.subscriber, 'ended')
  local side = side_key(claim.subscriber)
  if redis.call('HGET', side, 'claim') == claim_number then redis.call('HSET', side, 'claim', '0') end
  if not committed then end_passed(claim) end
  return claim
end

-- Claims whose lease has ended. The hop may go on, and counts if it commits.
local function lapse()
  for _, claim_number in ipairs(redis.call('ZRANGEBYSCORE', part('leases'), '-inf', int(now))) do
    local claim = end_claim(claim_number, false)
    if claim then
      local side = side_key(claim.subscriber)
      if number(redis.call('HGET', side, 'serial')) == claim.serial then
        redis.call('HSET', side, 'over', int(claim.call), 'error', 'its claim of ' .. claim.source .. ' was not renewed')
      end
      event('claim_lapsed', 'publication', req.publication, 'subscriber', claim.subscriber, 'source', claim.source,
        'seq', int(claim.seq))
    else
      redis.call('ZREM', part('leases'), claim_number)
    end
  end
end

-- ms until the first lease lapses, at least 1; 0 if there is none.
local function first_lapse()
  local first = redis.call('ZRANGE', part('leases'), 0, 0, 'WITHSCORES')
  if #first == 0 then return 0 end
  return math.max(1, tonumber(first[2]) - now + 1)
end

-- Give free places to those who wait, in the order in which they have asked.
local function match()
  drop_orphans()
  -- Nobody has anything newer for these: they serve on.
  for i = #draining, 1, -1 do
    local id = draining[i]
    local low = redis.call('ZSCORE', part('wanted'), id)
    if not low or redis.call('ZCOUNT', part('offers'), '(' .. low, '+inf') == 0 then serve_on(id) end
  end
  if vanished then
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', part('wanted'), 0, 0)) do
      local ask = object(redis.call('HGET', part('asks'), id))
      local text = ask and ask.version and ask.version ~= '' and pinned(id, ask)
      if text then
        refuse_ask(id, ask, text)
      end
    end
  end
  local function top()
    local first = redis.call('ZREVRANGEBYSCORE', part('free'), '+inf', '-inf', 'WITHSCORES', 'LIMIT', 0, 1)
    local found = #first > 0 and tonumber(first[2]) or 0
    local publisher = #avoiding > 0 and (P.holder or '') ~= '' and holder(P.holder)
    return publisher and math.max(found, offer(publisher, true)) or found
  end
  -- Whether somebody was served who passes on what it gets, which may be for those who came before.
  local function serve_queue()
    local best, wanted, closed, passed = top(), {}, {}, false
    local least = redis.call('ZRANGE', part('wanted'), 0, 0, 'WITHSCORES')
    if #least == 0 or best <= tonumber(least[2]) then return false end
    local flat = redis.call('ZRANGE', part('wanted'), 0, -1, 'WITHSCORES')
    for i = 1, #flat, 2 do wanted[flat[i]] = tonumber(flat[i + 1]) end
    -- What the publisher keeps back because its other slots are read. Whoever waits for that comes before those who would
    -- go on reading the others.
    local publisher = (P.holder or '') ~= '' and holder(P.holder)
    local function kept_back()
      if not publisher or closed[P.holder] then return 0 end
      local _, back = claimable(publisher)
      return back
    end
    local back = kept_back()
    for _, id in ipairs(redis.call('ZRANGE', part('queue'), 0, -1)) do
      local low = wanted[id] or 0
      if low < best or low < back then
        local text = redis.call('HGET', part('asks'), id)
        local ask = text and object(text)
        if not ask then error("Redis key '" .. part('asks') .. "': field '" .. id .. "' is not a question") end
        local source, slot = choose(id, ask, closed)
        local own = holder(id)
        if not source then
          tell_unfit(id, ask)
          if back > 0 then
            local can = claimable(publisher)
            for i, s in ipairs(publisher.slots) do
              if not can[i] and fits(ask, P.holder, publisher, s) and not enough(ask, publisher, s) then
                closed[P.holder], back = true, 0
              end
            end
          end
        elseif own and own.used > 0 then
          -- Its turn has come, but others read the buffer that its hop would overwrite. It is given no more readers, and
          -- keeps its turn.
          if not own.draining then
            own.draining, draining[#draining + 1] = true, id
            index(id)
          end
        else
          grant(id, ask, source, slot)
          passed = passed or (own and own.passes)
        end
        best, back = top(), kept_back()
        if best == 0 then return false end
      end
    end
    return passed
  end
  while serve_queue() do end
end

-- ---- sides ------------------------------------------------------------------------------------------------
local function process(m) return m.host .. '/' .. int(m.pid) .. '/' .. int(m.start) end
local function shown(m) return 'pid ' .. int(m.pid) .. ' on host ' .. ((m.name or '') ~= '' and m.name or m.host) end
local function ranks_of(S, at)
  local found, count = {}, 0
  for field, text in pairs(S) do
    if string.match(field, '^%d+$') then
      local m = object(text)
      if not m or type(m.agent) ~= 'string' or type(m.host) ~= 'string' or type(m.pid) ~= 'number'
          or type(m.start) ~= 'number' then
        error("Redis key '" .. at .. "': field '" .. field .. "' is not a member")
      end
      found[tonumber(field)], count = m, count + 1
    end
  end
  return found, count
end

-- The holder of a side whose ranks are all there.
local function add_holder(side, S, ranks)
  local id = side .. '/' .. S.serial
  local agents, hosts, known = {}, {}, {}
  for rank = 0, number(S.world) - 1 do
    local m = ranks[rank]
    if not known['a' .. m.agent] then known['a' .. m.agent], agents[#agents + 1] = true, m.agent end
    if not known['h' .. m.host] then known['h' .. m.host], hosts[#hosts + 1] = true, m.host end
  end
  local h = holder(id)
  if h then
    h.agents, h.hosts = agents, hosts
  elseif number(S.places) > 0 then
    local slots = {}
    for i = 1, number(S.slots) do slots[i] = {seq = 0, version = '', description = '', used = 0, children = {}} end
    h = {side = side, serial = number(S.serial), launch = S.launch, world = number(S.world), digest = S.digest,
      zone = S.zone, hosts = hosts, agents = agents, publisher = S.role == 'publisher', orphan = false,
      places = number(S.places), passes = S.passes == '1', used = 0, copies = number(S.copies), slots = slots}
    holders[id] = h
    -- What its agents have put back while ranks were missing.
    for _, held in ipairs(object(S.pending) or {}) do
      local s = slots[held.slot + 1]
      if s then s.seq, s.version, s.description = held.seq, held.version, held.description end
    end
    redis.call('HSET', side_key(side), 'pending', '')
  end
  if h then index(id) end
  if S.role == 'publisher' then P.holder = id end
  return h
end

-- Why a launch may not come again: another one has superseded it.
local function retired_text(side, launch)
  for _, one in ipairs(retired) do
    if one[1] == side .. '/' .. launch then return one[2] end
  end
  return nil
end

-- Why this launch of a side is over; nil if it is not, or nothing is known of it.
local function over_text(side, launch_serial)
  for i = #retired, 1, -1 do
    if retired[i][3] == launch_serial and string.sub(retired[i][1], 1, #side + 1) == side .. '/' then
      return 'this launch of ' .. side .. ' in publication ' .. req.publication .. ' is over: ' .. retired[i][2]
    end
  end
  return nil
end

-- A put takes the version out of its slot. Until a rank writes there it can be put back.
local function put_back(id, put)
  local h = holder(id)
  local s = h and h.slots[put.slot + 1]
  if s and s.seq == 0 and put.kept and put.kept.seq > 0 then
    s.seq, s.version, s.description, s.children, s.from = put.kept.seq, put.kept.version, put.kept.description, {}, nil
    index(id)
  end
end

-- A launch of a side is over. Its ranks may come again, if no other launch has superseded it.
local function end_side(side, S, reason, text)
  local id = side .. '/' .. S.serial
  retired[#retired + 1] = {side .. '/' .. (reason == 'relaunched' and S.launch or ''), text, number(S.serial)}
  if #retired > 64 then table.remove(retired, 1) end
  leave_queue(id)
  if number(S.claim) > 0 then end_claim(S.claim, false) end
  local h = holder(id)
  if S.role == 'publisher' then
    if h then
      local put = (S.put or '') ~= '' and object(S.put)
      if put and not put.given then put_back(id, put) end
      local newest = 0
      for _, s in ipairs(h.slots) do newest = math.max(newest, s.seq) end
      for _, s in ipairs(h.slots) do if s.seq > 0 and s.seq < newest then clear(id, s) end end
      h.orphan, orphans[#orphans + 1] = true, id
      index(id)
    end
    if P.publisher == side then
      P.state, P.holder = reason == 'closed' and 'closed' or 'lost', ''
    end
  else
    drop(id)
    redis.call('ZREM', part('held'), id)
  end
  redis.call('DEL', side_key(side))
  redis.call('SREM', part('sides'), side)
  event('left', 'publication', req.publication, 'side', side, 'reason', reason, 'text', text)
  wake(side, 'left')
end

-- The side, if this launch of it still is; otherwise nil and the answer that says why not: "group_lost" if it is over,
-- "forgotten" if nothing is known of it, because Redis has lost it.
local function current_side(side, launch_serial)
  local S = hash(side_key(side))
  if S.serial and number(S.serial) == launch_serial then return S end
  local text = over_text(side, launch_serial)
  if text then return nil, refuse('group_lost', text) end
  local code = S.serial and number(S.serial) > launch_serial and 'group_lost' or 'forgotten'
  return nil, refuse(code, 'this launch of ' .. side .. ' in publication ' .. req.publication .. ' is over')
end

-- Write back what has changed.
local function finish()
  for _, id in ipairs(touched) do
    local h = holders[id]
    if h then redis.call('HSET', part('holders'), id, json(h)) end
  end
  redis.call('HSET', key, 'state', P.state or 'open', 'seq', int(number(P.seq)), 'version', P.version or '',
    'description', P.description or '', 'publisher', P.publisher or '', 'launch', P.launch or '', 'holder', P.holder or '',
    'serial', int(serial), 'order', int(order), 'swept', int(number(P.swept)), 'retired', list_text(retired),
    'orphans', list_text(orphans), 'draining', list_text(draining),
    'avoiding', list_text(avoiding))
  redis.call('SADD', PREFIX .. 'publications', req.publication)
  keep(PREFIX .. 'publications')
  keep(key)
  for _, name in ipairs(PARTS) do keep(part(name)) end
  if (P.description or '') ~= '' then keep(table_key(P.description)) end
end

-- End a side that was complete, and of which a rank is missing or its agent has not answered for longer than a lease since
-- that was seen first. (A Redis that was restored does not know the agents until their next beat; and of an empty one the
-- agents put back their ranks one after the other, but not a rank that has left before.) Answers the refusal, nil if the
-- side goes on.
local function end_if_silent(side, S, ranks)
  for rank = 0, number(S.world) - 1 do
    local m = ranks[rank]
    if not m or not served({m.agent}) then
      if number(S.silent) == 0 then
        S.silent = int(now)
        redis.call('HSET', side_key(side), 'silent', S.silent)
      end
      if now - number(S.silent) <= req.agent_lease then return nil end
      local text = 'rank ' .. int(rank) .. ' of ' .. side .. ' has left'
      if m then text = 'the agent of rank ' .. int(rank) .. ' of ' .. side .. ' (' .. shown(m) .. ') does not answer' end
      end_side(side, S, 'died', text)
      lapse()
      match()
      finish()
      return refuse('group_lost', 'this launch of ' .. side .. ' in publication ' .. req.publication .. ' is over: ' .. text)
    end
  end
  if number(S.silent) > 0 then redis.call('HSET', side_key(side), 'silent', '0') end
  return nil
end
