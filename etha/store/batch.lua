-- Set fields of a batch. KEYS: batch. Generation, epoch and seq never go back: an older writer changes nothing newer.
local key, fields = KEYS[1], req.fields
local B = hash(key)
local behind = fields.generation and number(fields.generation) < number(B.generation)
local older = fields.seq and number(fields.seq) < number(B.seq)
local of_seq = {seq = true, version = true, last_seconds = true, transport = true}
local set = {}
for name, value in pairs(fields) do
  local skip = (of_seq[name] and older) or (not of_seq[name] and behind)
    or (name == 'epoch' and number(value) < number(B.epoch))
  if not skip then set[#set + 1] = name; set[#set + 1] = value end
end
for name, value in pairs({state = 'registered', generation = '0', epoch = '0', seq = '0'}) do
  redis.call('HSETNX', key, name, fields[name] or value)
end
if #set > 0 then redis.call('HSET', key, unpack(set)) end
redis.call('SADD', PREFIX .. 'batches', req.pair .. '/' .. req.batch)
keep(PREFIX .. 'batches')
if redis.call('HGET', key, 'state') == 'closed' then redis.call('PEXPIRE', key, req.closed) else keep(key) end
changed(key, redis.call('HGET', key, 'state'))
return ok(#set > 0)
