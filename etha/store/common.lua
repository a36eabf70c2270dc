-- Stands in front of every script. ARGV[1] is JSON with the namespace's prefix under "prefix" and leases in ms.
-- Scripts answer JSON: {"ok": ...} or {"error": code, "text": ..., ...}.
local req = cjson.decode(ARGV[1])
local PREFIX = req.prefix

local function ok(value) return cjson.encode({ok = value}) end

local function refuse(code, text, more)
  local answer = more or {}
  answer.error, answer.text = code, text
  return cjson.encode(answer)
end

-- cjson writes "/" as "\/", which is right but not readable.
local function json(value) return (string.gsub(cjson.encode(value), '\\/', '/')) end

local function hash(key)
  local flat, found = redis.call('HGETALL', key), {}
  for i = 1, #flat, 2 do found[flat[i]] = flat[i + 1] end
  return found
end

local function object(text)
  if not text or text == '' then return {} end
  local fine, value = pcall(cjson.decode, text)
  if not fine or type(value) ~= 'table' then return nil end
  return value
end

-- {} is an object for us, never a list.
local function object_text(value)
  if next(value) == nil then return '{}' end
  return json(value)
end

local function event(kind, ...)
  redis.call('XADD', PREFIX .. 'events', 'MAXLEN', '~', req.max_events, '*', 'kind', kind, ...)
  redis.call('PEXPIRE', PREFIX .. 'events', req.history)
  redis.call('PUBLISH', PREFIX .. 'events', kind)
end

local function changed(key, what) redis.call('PUBLISH', key, what) end
-- Of up to so many, everybody who comes is announced. To a thousand a thousand announcements would be a million, and who
-- hears one reads what all have said. So of more only the first and the last are; who waits looks every two seconds, too.
local FEW = 16

local function keep(key) redis.call('PEXPIRE', key, req.history) end

local function number(text) return tonumber(text or '0') or 0 end
